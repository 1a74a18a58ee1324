"""A federation without a server: peers share a growing set of signed uploads, and each computes the model from it.

roster.py    the file that all peers have: their keys, their addresses, the times of the rounds
entry.py     an element of the set: an upload, signed
rule.py      the set's rule: which elements are taken, and the model that follows from them
store.py     a peer's copy of the set, in one SQLite file
app.py       the four requests that one peer can make of another, as an ASGI application
gossip.py    pushing of what is new, and comparison of two copies until they are one
tls.py       TLS in which both sides show the key of a peer
peer.py      a peer: serves, gossips, trains when a round opens, keeps the model in the end
cli.py       the command peer

The rule is in docs/peers.md. What is signed, checked and added up is what every transport has.
"""
