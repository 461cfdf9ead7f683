"""Silence the messages of torch's libraries for a script that imports this before them."""

from outrider.cli.errors import silence_bars, silence_libraries

silence_libraries()
silence_bars()
