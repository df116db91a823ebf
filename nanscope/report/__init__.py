"""A result in, a rendering out.

from nanscope.report import render

render(scope.verdict, "report.html")        # or .png, .txt, .json
"""

from nanscope.report.render import render, suffixes

__all__ = ["render", "suffixes"]
