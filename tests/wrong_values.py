"""What is wrong with the values of a configuration."""

from typing import Any

import pytest
from pydantic import ValidationError

from outrider.data.fields import problems_of


def problems(config_class: Any, **values: Any) -> list[str]:
    """A line for each problem, as users see them."""
    with pytest.raises(ValidationError) as caught:
        config_class(**values)
    return problems_of(caught.value)
