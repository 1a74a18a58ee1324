"""Rounds over a network, with Flower as the transport. Needs the extra `fedkseed[flower]`.

server/          the server's side: ServerApp, processes, the transport to its clients
client/          the client's side: ClientApp, worker, processes, consent
envelope.py      tasks and replies: the bytes around our messages
signatures.py    signatures of tasks and of answers
messages.py      bytes in Flower's messages
recipes.py       recipes over a network
compat.py        workarounds for Flower, with the version that needs each
children.py      Flower's programs, as child processes that end with their parent
certs.py cli.py  keys and certificates; the three commands
simulation.py    many virtual clients on Flower's simulation engine
strategy.py      our algorithms inside another Flower project
loopback.py      a Grid in one process
"""
