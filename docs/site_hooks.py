"""What the site takes from outside of ``docs``: the examples, each on a page of its own, and the changelog."""

import ast
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
EXAMPLE_LINK = re.compile(r"\]\(\.\./examples/(?P<path>[\w/]*?)(?P<suffix>\.py|/)?\)")


def on_files(files, config):
    """Adds the generated pages."""
    programs = [path for folder in (".", "large", "user_models") for path in sorted((EXAMPLES / folder).glob("*.py"))]
    pages = {f"examples/{program.relative_to(EXAMPLES).with_suffix('.md')}": example(program) for program in programs}
    pages["examples/index.md"] = index(programs)
    pages["changelog.md"] = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to programs lead to their pages here."""
    return EXAMPLE_LINK.sub(page_of, markdown)


def page_of(link: re.Match) -> str:
    """Where a link to a program, or to the folder of all, leads on the site."""
    return f"](examples/{link['path']}.md)" if link["suffix"] == ".py" else "](examples/index.md)"


def example(program: Path) -> str:
    """A page that shows a program."""
    return f"# {program.name}\n\n{summary(program)}\n\n```python\n{program.read_text()}```\n"


def index(programs: list[Path]) -> str:
    """A list of the programs, each with the first line of its docstring."""
    links = [f"- [{path.name}]({path.relative_to(EXAMPLES).with_suffix('.md')}): {summary(path)}" for path in programs]
    return "# Examples\n\nPrograms of one page, which the tests run.\n\n" + "\n".join(links) + "\n"


def summary(program: Path) -> str:
    """The first line of a program's docstring."""
    return ast.get_docstring(ast.parse(program.read_text())).partition("\n")[0]
