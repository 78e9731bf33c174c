"""What a node shows of itself; the pictures are in `viz`, imported when one is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO, cast, overload

from .. import files
from .node import Node

if TYPE_CHECKING:
    from .heddle import Heddle

    Label = Callable[[Heddle], str]


class Shown(Node):
    """A node as text, HTML, Graphviz and Mermaid. Nothing here changes the tree."""

    def show(
        self,
        *,
        node: Label | None = None,
        edge: Label | None = None,
        file: TextIO | None = None,
        limit: int | None = None,
    ) -> None:
        """Write the tree from here down to the terminal.

        Args:
            node: what to write for a node instead of its text and figures.
            edge: what to write on the line to a node, before it.
            file: instead of standard output.
            limit: lines at most; the rest is counted.
        """
        from ..viz.text import show

        show(self._heddle, node=node, edge=edge, file=file, limit=limit)

    @overload
    def to_html(
        self,
        path: None = None,
        *,
        tint: str = "probability",
        top: int = 0,
        limit: int | None = None,
        node: Label | None = None,
        mark: Heddle | None = None,
    ) -> str: ...

    @overload
    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        tint: str = "probability",
        top: int = 0,
        limit: int | None = None,
        node: Label | None = None,
        mark: Heddle | None = None,
    ) -> None: ...

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        tint: str = "probability",
        top: int = 0,
        limit: int | None = None,
        node: Label | None = None,
        mark: Heddle | None = None,
    ) -> str | None:
        """Return the tree from here down as one HTML page, or write it to a file.

        The page folds, loads nothing and can be searched; its tokens are tinted, and the figures
        of a token show under the pointer. Beyond 60 nodes it begins with an overview, and only the
        path to `mark`, or else the best one, is unfolded.

        Args:
            path: a file to write to; then None is returned.
            tint: "probability", "entropy" or "none": the tint when the page is opened.
            top: alternatives to show for each sampled token. From 1 on the model is asked: one
                forward over each node's tokens.
            limit: nodes at most, those nearest to here; the rest is counted.
            node: what to write for a node instead of its text.
            mark: the path to this node is marked.

        Raises: ConfigError for `top` without a model, StoreError when the file cannot be written.
        """
        from ..viz.html import to_html

        page = to_html(self._heddle, tint=tint, top=top, limit=limit, node=node, mark=mark)
        if path is None:
            return page
        files.write(path, page)
        return None

    def to_dot(
        self,
        *,
        node: Label | None = None,
        edge: Label | None = None,
        limit: int | None = None,
    ) -> str:
        """Return the tree from here down in Graphviz's language; boxes are tinted by mean p.

        Args:
            node, edge: what to write in a box and on the line to it.
            limit: nodes at most, those nearest to here; the rest is counted.
        """
        from ..viz.dot import to_dot

        return to_dot(self._heddle, node=node, edge=edge, limit=limit)

    def to_mermaid(
        self,
        *,
        node: Label | None = None,
        edge: Label | None = None,
        limit: int | None = 150,
    ) -> str:
        """Return the tree from here down as a Mermaid flowchart, for Markdown pages.

        Args:
            node, edge: what to write in a box and on the line to it.
            limit: nodes at most, those nearest to here; never more than Mermaid takes at its
                defaults. The rest is counted.
        """
        from ..viz.mermaid import to_mermaid

        return to_mermaid(self._heddle, node=node, edge=edge, limit=limit)

    @property
    def _heddle(self) -> Heddle:
        # Nodes are always heddles: this class is a part of theirs.
        return cast("Heddle", self)

    def __str__(self) -> str:
        from ..viz.text import draw

        return "\n".join(draw(self._heddle))

    def _repr_html_(self) -> str:
        from ..viz.notebook import tree

        return tree(self._heddle)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return the drawing as text and as HTML: a notebook keeps both."""
        from ..viz.notebook import plain

        return {"text/plain": plain(self._heddle), "text/html": self._repr_html_()}
