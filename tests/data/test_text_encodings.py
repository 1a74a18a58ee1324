"""Texts in the encodings of offices' programs, told from each other by how five languages are written."""

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkseed import FedKSeedError
from fedkseed.data.text_encodings import GUESSED, decode, encoding_of, marked_encoding

SENTENCES = {  # as offices have them
    "de": ["Der Zuschuss beträgt 12,50 (brutto), zahlbar jetzt; Grüße, Jörg Müller.", "ÜBERSTUNDEN: heißt das 5 %?"],
    "fr": ["Où est la clé n° 4 ?", "Elle a été déposée à l'accueil, s'il vous plaît, François : «comme d'habitude»."],
    "es": ["¿Cuándo será la reunión de mañana?", "Según el acuerdo, mañana por la tarde; ¡sí, señor Núñez!"],
    "it": ["Perché non è più così?", "La società pagherà lunedì, com'è già stato detto: 5 °C."],
    "en": ["The café’s résumé — naïve…", "“Yes”, it costs £5."],
}  # fmt: skip
WORDS = [
    "für",
    "Tür",
    "größer",
    "Öl",
    "Äpfel",
    "été",
    "Noël",
    "garçon",
    "forêt",
    "où",
    "niño",
    "acción",
    "Ángel",
    "più",
    "già",
    "però",
    "città",
    "plain",
    "words",
    "7",
]
POLISH = "Zażółć gęślą jaźń, proszę o odpowiedź na pytanie w tej sprawie, żeby było już wiadomo, gdzie są środki."


def written(text: str, encoding: str) -> bytes:
    """A text without what an encoding lacks, as a program asks to leave it out."""
    return text.encode(encoding, "ignore")


@settings(max_examples=150, deadline=None)
@given(
    encoding=st.sampled_from(["utf-8", *GUESSED]),
    language=st.sampled_from([*SENTENCES]),
    more=st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join),
)
def test_the_encoding_of_an_office_is_known_by_its_words(encoding, language, more):
    content = written(" ".join([*SENTENCES[language], more]), encoding)
    chosen, note = encoding_of(content, "a.csv")
    assert decode(content, "a.csv", chosen) == content.decode(encoding)
    assert bool(note) == (encoding != "utf-8")


def test_a_guess_is_said_with_words_that_show_whether_it_is_right():
    note = encoding_of("Grüße von Jörg Müller aus Köln".encode("cp1252"), "a.csv")[1]
    assert note == 'read as Windows-1252, a guess, with "Grüße", "Jörg", "Müller"'
    assert encoding_of(b"plain", "a.csv") == ("utf-8", "")
    assert encoding_of(codecs.BOM_UTF8 + b"\xe4", "a.csv")[0] == "utf-8"  # the mark says so: it is damaged


@pytest.mark.parametrize(
    ("text", "encoding"), [("Ответ на вопрос", "cp1251"), (POLISH, "cp1250"), ("Απάντηση στην ερώτηση", "cp1253")]
)
def test_no_guess_is_made_for_text_that_looks_like_none_of_the_languages(text, encoding):
    with pytest.raises(FedKSeedError, match=r"a.csv: not valid UTF-8, and no likely words as .* 850, but .*; save"):
        encoding_of(text.encode(encoding), "a.csv")


def test_a_few_wrong_bytes_in_utf_8_are_damage_and_no_other_encoding():
    content = " ".join(SENTENCES["de"]).encode() + b"\xe4"
    assert encoding_of(content, "a.csv") == ("utf-8", "")
    with pytest.raises(FedKSeedError, match=r"line 2: not valid UTF-8 \(byte 0xE4 at \d+, perhaps of Windows-1252\)"):
        decode(content, "line 2")
    with pytest.raises(FedKSeedError, match=r"line 2: not valid Windows-1252 \(byte 0x81 at 2\)"):
        decode(b"\xe4\x81", "line 2", "cp1252")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le", "utf-16-be"])
def test_encodings_of_wide_characters_are_known_by_their_mark_or_zeros(encoding):
    for sentences in SENTENCES.values():
        shown = marked_encoding(" ".join(sentences).encode(encoding))
        assert shown == encoding
    assert marked_encoding(bytes(8)) is None
    assert marked_encoding(b"") is None
    assert marked_encoding(b"a,b\n\0") is None
