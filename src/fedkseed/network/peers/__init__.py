"""A federation without a server: peers share a growing set of signed uploads, and each computes the model from it.

roster.py         the file that all peers have: their keys, their addresses, the times of the rounds
signed_upload.py  an element of the set
merge_rule.py     which uploads are taken, and the model that follows from them
store.py          the uploads that a peer has, in one SQLite file
tls.py            TLS in which both sides show the key of a peer
app.py            the four requests that one peer can make of another, as an ASGI application
gossip.py         pushing of what is new, and comparison of two stores until they are one
peer.py           a peer: serves, gossips, trains when a round opens, keeps the model in the end
verify.py         the model of a peer's directory, recomputed from its uploads

The rule is in docs/peers.md. What is signed, checked and added up is what every transport has.
"""

FILE = "peer.sqlite"  # in a peer's directory; here, as who asks for it may lack the packages of the modules
