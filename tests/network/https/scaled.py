"""A command whose times for lost connections are a twelfth: `python -m tests.network.https.scaled PROGRAM ARGUMENTS`.

What takes six minutes of a user's, as a network that is away, is shown in half a minute.
"""

import sys

from fedkseed.__main__ import main
from fedkseed.network import http_client
from fedkseed.network.https import connections, join

TIMES = 12
SCALED = ((connections, "AWAY"), (http_client, "CONNECT"), (join, "BEAT"), (join, "TIMEOUT"), (join, "LONGEST"))

if __name__ == "__main__":
    for module, name in SCALED:
        setattr(module, name, getattr(module, name) / TIMES)
    sys.argv = sys.argv[1:]
    main()
