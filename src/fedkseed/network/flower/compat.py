"""Facts about the Flower that is tested; no other file names a version.

For an upgrade: change pyproject.toml, run tests/network/flower, and `pytest -m network tests/network/flower`.
"""

# 1.41: an error is a number and a reason in Flower's terms; these words come first for whoever runs a server.
NODE_GONE = 5
ERRORS = {
    1: "its ClientApp can't be loaded",
    2: "its ClientApp failed",
    3: "its reply is missing, or its message",
    4: "its reply was lost",
    NODE_GONE: "it is gone",
    8: "its ClientApp was killed",
}
