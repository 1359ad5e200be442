"""results/english.py on two articles and two books."""

import hashlib
import textwrap

from conftest import script


def test_documents_without_downstream_text(tmp_path):
    """13 words of GLUE, not 12, drop a document; of the others only paragraphs stay, as lines."""
    glue = "It was in the spring of that year he came to the town"
    files = {"glue/RTE/train.tsv": f"index\tsentence1\n0\t{glue}.\n"}
    lines = [f"In {year} the house on the bank was sold to a man of the town." for year in range(9)]
    innocent = ["Ely is a town on a river of that name.", glue.replace("It", "That") + ".", *lines]
    debris = f"Ely\nThe name of it\n<br>{lines[0]}\nEly (; ]) is a town on a river of that name."
    for i, article in enumerate(([*lines, f"A {glue.lower()}."], [debris, *innocent[1:]])):
        doc = f'<doc id="{i}" url="u" title="Ely">\n' + "\n".join(article) + "\n\n</doc>\n"
        files[f"wiki/text/AA/wiki_0{i}"] = doc
    paragraphs = [f"In the year {year}, {' '.join(lines)}" for year in range(40)]
    verse = "The house on the bank,\nIt is a house of old.\nIn it he was, and sank.\n\n"
    body = verse.join(textwrap.fill(paragraph, 70) + "\n\n" for paragraph in paragraphs)
    mark = "OF THIS PROJECT GUTENBERG EBOOK ELY ***"
    book = f"*** START {mark}\n\n{body}*** END {mark}\n\n{paragraphs[0]}\n"
    files["books/Anon/Ely.txt"] = f"Title: Ely\n\n{book}"
    files["books/Anon/Bath.txt"] = f"This is a COPYRIGHTED book.\n\n{book}"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    folders = [tmp_path / name for name in ("wiki", "books", "glue", "english.txt")]
    printed = script("results/english.py", *folders)
    data = folders[-1].read_bytes()
    article, book = sorted(data.decode().split("\n\n"), key=len)
    assert article.split("\n") == innocent
    assert book.count("\n") > 20 and "\n".join(paragraphs).find(book) > 0
    assert "1 dropped for 1 runs" in printed and hashlib.sha256(data).hexdigest() in printed
    script("results/english.py", *folders)
    assert folders[-1].read_bytes() == data
    assert "text/*/wiki_*: " in script("results/english.py", tmp_path, *folders[1:], status=1)
