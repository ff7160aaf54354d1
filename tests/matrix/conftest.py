"""The device `sim` for the twins, which run in the process of the tests."""

from tests.device.conftest import sim, sim_library  # noqa: F401  fixtures
