"""What each stage takes, as Markdown: `eyas stages`, and docs/stages.md."""

from pydantic_core import PydanticUndefined

from eagle3_core.contract.params import STAGES, StageParams


def markdown() -> str:
    """One section a stage, one row a field, made from the parameter classes."""
    lines = [
        "# Stages and their parameters",
        "",
        "Made by `eyas stages`. Paths are absolute. A field without a default is required; unknown fields are refused.",
    ]
    for params in STAGES.values():
        lines += ["", f"## {params.stage}", "", (params.__doc__ or "").strip(), "", *_table(params)]
    return "\n".join(lines) + "\n"


def _table(params: type[StageParams]) -> list[str]:
    rows = ["| field | type | default | |", "|---|---|---|---|"]
    properties = params.model_json_schema()["properties"]
    for name, field in params.model_fields.items():
        default = "required" if field.default is PydanticUndefined else f"`{field.default!r}`"
        rows.append(f"| `{name}` | {_type(properties[name])} | {default} | {field.description or ''} |")
    return rows


def _type(schema: dict[str, object]) -> str:
    """A JSON schema as a few words: its kind and bounds."""
    options = schema.get("anyOf")
    if isinstance(options, list):
        return _type(next(option for option in options if option.get("type") != "null"))
    if "enum" in schema:
        values = schema["enum"]
        assert isinstance(values, list)
        return " or ".join(f"`{value}`" for value in values)
    words = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = [f"{sign} {schema[key]}" for key, sign in words.items() if key in schema]
    kind = str(schema["type"])
    if kind == "array":
        items = schema["items"]
        assert isinstance(items, dict)
        kind = f"list of {items['type']}s"
    return " ".join([kind, *bounds])
