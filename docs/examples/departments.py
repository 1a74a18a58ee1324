"""Requests that three departments of a company got, each with the desk that took it: `python departments.py FOLDER`.

Writes hr.csv, it.csv and legal.csv, with the columns question and answer and 192 rows each. A desk has eight sentences
and eight things that they may be about; its rows are all pairs. The requests are invented.
"""

import csv
import sys
from pathlib import Path

DESKS = {
    "hr": {
        "payroll": (
            [
                "My payslip is wrong: {} is missing.",
                "When will {} be paid?",
                "Why was tax taken off {}?",
                "{} went to my old bank account.",
                "The amount of {} is too low this month.",
                "Please correct {} on my salary statement.",
                "Was {} counted in this month's pay?",
                "I got no money for {}.",
            ],
            [
                "my bonus", "my overtime", "my travel allowance", "my sick pay",
                "my holiday pay", "my raise", "my commission", "my night premium",
            ],
        ),
        "leave": (
            [
                "Can I take two days off {}?",
                "I would like to be away {}.",
                "Nobody answered my request for a holiday {}.",
                "Who covers for me while I am off {}?",
                "I must cancel my holiday {}.",
                "May I work half days {}?",
                "How many free days do I have left {}?",
                "I plan a long weekend {}.",
            ],
            [
                "in May", "next week", "over Christmas", "at Easter",
                "in the summer", "after my wedding", "during the school break", "on 3 June",
            ],
        ),
        "hiring": (
            [
                "We need {} from next month on.",
                "Please put up an advertisement for {}.",
                "Who interviews the candidates for the job of {}?",
                "My cousin would like to apply as {}.",
                "Has anybody applied for the vacancy of {}?",
                "When does our new colleague start as {}?",
                "What should we offer {} who has just left school?",
                "The team is short of {}.",
            ],
            [
                "an accountant", "a welder", "a web developer", "a receptionist",
                "a sales clerk", "a storekeeper", "an electrician", "a designer",
            ],
        ),
    },
    "it": {
        "hardware": (
            [
                "{} does not switch on.",
                "I dropped {} and it broke.",
                "I need a new cable for {}.",
                "{} makes a strange noise.",
                "Can somebody repair {}?",
                "{} gets very hot.",
                "Please replace {}.",
                "There is smoke coming out of {}.",
            ],
            [
                "my laptop", "my monitor", "the printer", "my keyboard",
                "the scanner", "my docking station", "the projector", "my headset",
            ],
        ),
        "accounts": (
            [
                "I forgot my password for {}.",
                "{} says that my user is locked.",
                "Please give our trainee a login for {}.",
                "My rights in {} are gone.",
                "I cannot sign in to {}.",
                "The code for signing in to {} never arrives.",
                "Who can reset my access to {}?",
                "Please remove my old user from {}.",
            ],
            [
                "the mail system", "the wiki", "the ticket system", "the shared calendar",
                "the test server", "the customer database", "the file store", "the time sheet",
            ],
        ),
        "network": (
            [
                "The wireless network is down {}.",
                "The internet is very slow {}.",
                "There is no signal {}.",
                "The VPN drops the line {}.",
                "Video calls freeze {}.",
                "The network socket is dead {}.",
                "Web pages do not load {}.",
                "We need more bandwidth {}.",
            ],
            [
                "on the third floor", "in the canteen", "in the warehouse", "at home",
                "in room 12", "in the meeting room", "in the new building", "at the reception",
            ],
        ),
    },
    "legal": {
        "contracts": (
            [
                "Please check the agreement with {}.",
                "May we end the contract with {}?",
                "Who signs the contract with {}?",
                "Which notice period do we have with {}?",
                "A draft from {} has a strange clause on liability.",
                "{} wants to change the terms of delivery.",
                "Is a spoken agreement with {} binding?",
                "{} missed the agreed deadline; what can we claim?",
            ],
            [
                "our supplier", "the landlord", "a new customer", "the cleaning company",
                "the software vendor", "our freight carrier", "an agency", "the caterer",
            ],
        ),
        "privacy": (
            [
                "How long may we keep {}?",
                "May we send {} to another company?",
                "Somebody asks us to delete {}.",
                "A stranger may have seen {}.",
                "Do we need consent for {}?",
                "Who may look at {}?",
                "{} were lost on a train; must we report that?",
                "May {} be stored in a foreign country?",
            ],
            [
                "customers' addresses", "photos of staff", "visitors' names", "health records",
                "readers' mail addresses", "camera recordings", "birth dates", "phone records",
            ],
        ),
        "trademarks": (
            [
                "A competitor uses {}.",
                "Can we register {}?",
                "Is {} protected abroad?",
                "May a partner print {} on a shirt?",
                "Somebody sells fakes with {}.",
                "Is there an older mark like {}?",
                "When does the protection of {} run out?",
                "A shop wants a licence for {}.",
            ],
            [
                "our logo", "our slogan", "the new product name", "our brand",
                "the company name", "our mascot", "the icon of our app", "our jingle",
            ],
        ),
    },
}  # fmt: skip


def rows(department: str) -> list[tuple[str, str]]:
    """Pairs of a request and the desk that took it, in the order of DESKS."""
    made = []
    for desk, (sentences, things) in DESKS[department].items():
        for sentence in sentences:
            questions = [sentence.format(thing) for thing in things]
            made += [(question[0].upper() + question[1:], desk) for question in questions]
    return made


def write(folder: Path) -> None:
    """Write a file a department into a folder, which may be new.

    Raises:
        FileExistsError: one of the files is there already.
    """
    paths = {department: folder / f"{department}.csv" for department in DESKS}
    if there := [str(path) for path in paths.values() if path.exists()]:
        raise FileExistsError(f"{there[0]} is there already; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for department, path in paths.items():
        with path.open("x", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("question", "answer"), *rows(department)])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("one folder is expected, which gets the three files, as: python departments.py departments")
    try:
        write(Path(sys.argv[1]))
    except FileExistsError as error:
        sys.exit(str(error))
