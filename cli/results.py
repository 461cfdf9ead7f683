"""What a command prints after the table: what to open next."""

import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

OWN_MODEL = "init my.yaml --target DIR_OR_ID --data FILE"


def print_next(files: Mapping[Path, str], console: Console) -> None:
    """Print the files to open, each with its content, and the command for the user's own model."""
    width = max(len(str(path)) for path in files)
    console.print(Text("\nOpen:", style="bold"))
    for path, content in files.items():
        console.print(Text(f"  {path!s:<{width}}  {content}"), soft_wrap=True)
    console.print(Text("Next, for your own model and data:", style="bold"))
    # A virtual environment that isn't active has its commands beside its Python only.
    command = "outrider" if shutil.which("outrider") else shlex.quote(str(Path(sys.executable).with_name("outrider")))
    console.print(Text(f"  {command} {OWN_MODEL}"), soft_wrap=True)
