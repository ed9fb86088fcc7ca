"""Model families: how each turns its config.json into layers and weights. A family is a row of one of these tables."""

from __future__ import annotations

from kvledger.spec.families.compressed import COMPRESSED_FAMILIES
from kvledger.spec.families.dense import DENSE_FAMILIES
from kvledger.spec.families.gemma import GEMMA_FAMILIES
from kvledger.spec.families.hybrid import HYBRID_FAMILIES
from kvledger.spec.families.latent import LATENT_FAMILIES
from kvledger.spec.families.moe import MOE_FAMILIES
from kvledger.spec.families.nested import NESTED_FAMILIES
from kvledger.spec.families.older import OLDER_FAMILIES
from kvledger.spec.families.parts import Builder

FAMILIES: dict[str, Builder] = {
    **DENSE_FAMILIES,
    **MOE_FAMILIES,
    **GEMMA_FAMILIES,
    **LATENT_FAMILIES,
    **COMPRESSED_FAMILIES,
    **HYBRID_FAMILIES,
    **NESTED_FAMILIES,
    **OLDER_FAMILIES,
}
