"""A server's side of a federation.

serving.py         the remaining rounds of a run
rounds.py          the parts of a run with clients of a network, with or without a model
clients.py         the transport of a round: who is asked, asked again, refused and left out
client_numbers.py  which client is at which node of the carrier
"""
