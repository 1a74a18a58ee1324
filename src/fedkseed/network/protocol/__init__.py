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

The way of one upload over HTTPS, as `round.py` draws it without a network:

    server/rounds.py NetworkRounds: Round.exchanges     https/join.py HttpsClient: asks for a task
    server/clients.py RemoteClients: _ask          -->  client/worker.py TaskHandler
    https/connections.py Connections: send              client/training_client.py TrainingClient: round.answer
    https/app.py: POST /v1/task/KEY                <--  https/join.py HttpsClient: sends the reply
    server/clients.py RemoteClients: _replies, _proven (the signature), _accepts
    Round.add_, and in the end Round.finish; run/loop.py commits the round
"""
