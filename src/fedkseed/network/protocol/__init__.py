"""A federation of separate machines, whatever carries its bytes: `network/https` does, and `network/flower`.

server/              the server's side: the rounds of a run, and the transport to its clients
client/              the client's side: the worker, the recipe that its owner consents to
carrier.py           what the rounds need of a transport
envelope.py          tasks and replies: the bytes around our messages
signatures.py        signatures of tasks and of answers
run_history.py       the log of a run as a client knows it
receipt_checks.py    the signatures of a run's kept uploads
masking_keys.py      keys of masked rounds, and a client's memory of them
client_gain.py       the tuned model at a client: was it of use?
networked_recipe.py  recipes over a network
certs.py             keys and certificates
addresses.py         addresses, files and disks that a command names
"""
