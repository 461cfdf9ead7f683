"""Model card of a package without weights: training-free drafters."""

from huggingface_hub import ModelCardData

from ...models.drafters.saved.parts import DrafterParts
from ..records.labels import title_of
from .card_code import render_card
from .card_options import TAGS, CardOptions, code_names


def training_free_card(parts: DrafterParts, options: CardOptions) -> str:
    """Write the card of a package without weights. Raises ValueError for facts about weights."""
    sources = {"an evaluation": options.evaluations, "a run": options.run, "a certificate": options.certificate}
    if given := [name for name, value in sources.items() if value]:
        raise ValueError(f"{parts.name} has no weights that {', '.join(given)} could belong to; package it without")
    data = ModelCardData(
        base_model=options.base_model,
        license=options.licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, *(part.name.replace("_", "-") for part in parts.parts)],
    )
    return render_card(
        "training_free_card.md.jinja",
        data,
        title=title_of(parts.kind),
        name=parts.name,
        licence=options.licence,
        **code_names(options, options.base_model, "", options.quantization),
    )
