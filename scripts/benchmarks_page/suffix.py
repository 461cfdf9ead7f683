"""Table of the index of SuffixDecoding."""

from .tables import Records, number, table


def suffix_index(records: Records, name: str) -> str:
    """Return memory and times of the index of long texts."""
    record = records.read(name)
    rows = [
        [
            text,
            number(values["megabytes"], 1),
            number(values["prompt_seconds"]),
            number(values["add_microseconds_per_token"], 1),
            f"{values['draft_microseconds']:.0f} / {values['draft_microseconds_99th_percentile']:.0f}",
        ]
        for text, values in record["texts"].items()
    ]
    lengths = [f"{record['tokens']:,} tokens", f"{record['prompt_tokens']:,} tokens"]
    columns = ["text", f"memory of {lengths[0]}, MB", f"a prompt of {lengths[1]}, s", "a token more, us"]
    return table([*columns, "a draft, us: median / 99th percentile"], rows)
