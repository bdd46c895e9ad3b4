"""The tests with real frameworks need what only `make test-frameworks` installs."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("lightning") and find_spec("accelerate") else ["test_frameworks.py"]
