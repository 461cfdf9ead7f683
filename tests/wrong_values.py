"""The problems of a configuration's values, for tests of config classes."""

from typing import Any

import pytest
from pydantic import ValidationError

from outrider.data.fields import problems_of


def problems(config_class: Any, **values: Any) -> list[str]:
    """Build the config class, and return one line for each problem, as users see them."""
    with pytest.raises(ValidationError) as caught:
        config_class(**values)
    return problems_of(caught.value)
