"""Writes tests/golden/transcripts.json: greedy answers of the default model to the golden transcripts' prompts.

    python scripts/make_transcripts.py

Made by the engine itself with its defaults; tests/test_golden.py compares them character by character. A vector path
has one fixed order of arithmetic, so its text is the same alone or in a batch, whatever the chunks and threads; between
paths the last bits of logits differ, so every token must lead the next by LEAD nats (try KVLEDGER_SIMD=generic, too).
"""

import json
import tomllib
from pathlib import Path

from kvledger import LLM, SamplingParams

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
LEAD = 0.4


def main() -> None:
    written = []
    with LLM("smollm2") as llm:
        assert llm.loaded.template is not None
        for row in tomllib.loads((GOLDEN / "prompts.toml").read_text())["transcript"]:
            text = row.get("text") or llm.loaded.template.render([{"role": "user", "content": row["chat"]}])
            ids = llm.tokenizer.encode(text)
            params = SamplingParams(temperature=0.0, max_tokens=row["max_tokens"], logprobs=2)
            (output,) = llm.generate([ids], params)
            answer = output.outputs[0]
            leads = [s.logprob - max(p for i, p in s.top if i != s.token_id) for s in answer.logprobs or ()]
            assert min(leads) >= LEAD, f"{row['name']}: token {leads.index(min(leads))} leads by {min(leads):.2f} only"
            written.append({"name": row["name"], "prompt": text, "token_ids": ids, "max_tokens": row["max_tokens"],
                            "text": answer.text, "finish_reason": answer.finish_reason})  # fmt: skip
            print(f"{row['name']} ({answer.finish_reason}, least lead {min(leads):.2f}): {answer.text!r}")
    (GOLDEN / "transcripts.json").write_text(json.dumps(written, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
