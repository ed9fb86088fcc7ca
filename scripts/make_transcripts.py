"""Writes tests/golden/transcripts.json: greedy answers of the default model to the ten golden prompts.

    python scripts/make_transcripts.py

Made by the engine itself with its defaults. Its arithmetic has one fixed order, so the text is the same alone or in a
batch, whatever the chunks and threads; tests/test_golden.py compares it character by character.
"""

import json
import tomllib
from pathlib import Path

from kvledger import LLM, SamplingParams

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
MAX_TOKENS = 48


def main() -> None:
    with LLM("smollm2") as llm:
        assert llm.loaded.template is not None
        rows = []
        for row in tomllib.loads((GOLDEN / "prompts.toml").read_text())["prompt"]:
            messages = [{"role": "system", "content": row["system"]}] if "system" in row else []
            text = row.get("text") or llm.loaded.template.render([*messages, {"role": "user", "content": row["chat"]}])
            ids = llm.tokenizer.encode(text)
            (output,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
            answer = output.outputs[0]
            rows.append({"name": row["name"], "token_ids": ids, "text": answer.text, "finish": answer.finish_reason})
            print(f"--- {row['name']} ({answer.finish_reason})\n{answer.text}")
    written = {"max_tokens": MAX_TOKENS, "transcripts": rows}
    (GOLDEN / "transcripts.json").write_text(json.dumps(written, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
