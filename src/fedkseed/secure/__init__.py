"""Secure aggregation: a server learns the sum of a round's uploads, and of no client's upload by itself.

    grid           changes of coefficients as whole numbers, so that masks cancel exactly
    key_exchange   secrets of two keys, and which keys are refused
    masks          seeds and masks, and which clients share them
    member         a client's side: masks its numbers, and gives shares of seeds
    server         the server's side: asks for shares, and takes the masks off the sum

docs/privacy.md says who learns what, and is the definition. Two legs a round:

    Secured   ->  the broadcast, the round's clients and their public keys
    Masked   <-   numbers + own mask + a mask with each other client, and shares of the seeds, sealed for each holder
    Survivors ->  whose numbers have come, and the sealed shares that these clients made for this one
    Shares   <-   of the own mask of each that is there, or of the masks with each that is not: never both of one

Sources: Bonawitz et al., 2017, https://doi.org/10.1145/3133956.3133982 (masks and shares); Bell et al., 2020,
https://doi.org/10.1145/3372297.3417885 (neighbours); Ma et al., 2023, https://eprint.iacr.org/2023/486 (keys that
last, so that a round needs no leg to exchange them). There shares are of secret keys, or of seeds encrypted to a
committee; here each client shares the seeds of its pairs themselves, which takes fewer legs and more bytes.
"""
