"""MkDocs hooks: formulas become MathML, and links to files beside docs/ lead to copies of them.

Browsers draw MathML by themselves: no script, no network. A link such as ../examples/digits.py is
right in the repository; on the site the file is copied into source/.
"""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files, config):
    """The site has the files beside docs/ that pages link to."""
    root, found = Path(config.docs_dir).parent, set()
    for page in files.documentation_pages():
        if "/" not in page.src_uri:
            found |= set(OUTSIDE.findall(page.content_string))
    for name in sorted(found):
        if not (root / name).is_file():
            raise ValueError(f"a page links to ../{name}, which is no file")
        content = (root / name).read_bytes()
        files.append(File.generated(config, f"source/{shown(name)}", content=content))
    return files


def shown(name: str) -> str:
    """Texts and programs as what a browser shows instead of saving it."""
    return name + ".txt" if name.endswith((".md", ".py")) else name


def on_page_markdown(markdown, page, **_):
    if "/" in page.file.src_uri:
        return markdown
    return OUTSIDE.sub(lambda match: f"](source/{shown(match[1])}", markdown)


def on_page_content(content, **_):
    def inline(match):
        return f'<span class="inline-formula">{convert(html.unescape(match[1]).strip())}</span>'

    def block(match):
        return f'<div class="formula">{convert(html.unescape(match[1]).strip(), "block")}</div>'

    content = BLOCK.sub(block, INLINE.sub(inline, content))
    if 'class="arithmatex"' in content:
        raise ValueError("a formula was left over: " + content.split('class="arithmatex"')[1][:80])
    return content
