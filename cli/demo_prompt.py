"""The demo's prompt: prose of our own, so that the demo runs from an installed package too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT = """\
A library keeps a ledger of the books that leave the building. Each line names the book, the
reader, the day it went out and the day it should return. In the first year one clerk kept the
ledger by hand, and the clerk knew every reader by name. In the third year the library lent so
many books that no single page could hold a day, and the clerk began to write the letters of the
alphabet on the edges of the pages so that a name could be found without reading every line
before it. That was an index, although nobody called it one.

The reading room had three kinds of place. On the long table lay the books that somebody was
reading at that moment. There was room for forty. Behind the desk stood a shelf for the books
that had been asked for today or yesterday, because a book that was asked for once is often asked
for again before the week is over. Everything else was in the cellar, where there was room for
all of it, and where fetching one volume took a quarter of an hour. When the table was full, the
clerk carried the book that had been left alone for the longest time back to the shelf, and when
the shelf was full, back to the cellar. Nothing was thrown away merely because the table was
small.

One winter the cellar was flooded. Some books were only damp at the edges, some had lost whole
pages, and a few looked sound from the outside but had pages in which the ink had run from one
sheet to the next. The librarian made a rule then that is still kept. On the last page of each
book somebody writes the number of its pages and a sum over the letters of each page. Whoever
takes a book from the cellar counts again before handing it to a reader. If the sum is wrong the
book is put aside and the reader is told that the library does not have it. A reader who is told
no can look elsewhere. A reader who is given a wrong page does not know that anything is missing,
and builds an argument on it, and others build on that argument.

The second rule is about time. A reader who has waited as long as it would take to work the
answer out alone should not be kept waiting any longer. The clerk therefore says at once which of
the books lie on the table, which are on the shelf and which would have to be fetched, and how
long that would take. The reader may take the first four volumes and leave the fifth, since the
first four can be read without it. Often the volumes of a long work are asked for in their order,
and almost always from the first one, because few people begin in the middle. So the clerk looks
for the longest run of volumes that begins with the first and has no gap.

The third rule is that every place has a size. The table has forty places, the shelf has four
hundred, the list of errands for the boy who walks to the cellar has twelve lines and no more.
When the list is full the clerk does not write in the margin. The errand is refused, politely and
at once, and the refusal is counted, and at the end of the month the librarian looks at the
counts and decides whether to hire a second boy. A list without an end looks generous, but it is
a promise that nobody has measured.

Once a month a visitor asks why the library keeps four copies of the same catalogue in different
rooms. The answer is that the catalogue is small and the walk is long. The books are large, and
of these there is one copy in the cellar, and for some a second one upstairs. Which of them
deserve the second copy is a question about the future, and the clerk has only the past to go by.
A book that was read by many people over many weeks will probably be read again. A book that was
read by one person from the first page to the last in a single afternoon will probably not, even
though that reader turned more pages than anyone else on that day.

What follows is the report of the clerk for the last month of the year, with the number of
readers, the number of books lent, and the reasons that were given for each refusal. The report
begins with
"""


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """Return the first *count* tokens of the text, which starts over as often as needed."""
    once: list[int] = tokenizer(TEXT)["input_ids"]
    return (once * -(-count // len(once)))[:count]
