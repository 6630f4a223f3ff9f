"""`GET /docs`: the operations of the service for a person, from its OpenAPI description."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse


def add_routes(app: FastAPI) -> None:
    """Add `/docs`; FastAPI's own pages load scripts from elsewhere, which a firewall may forbid."""

    @app.head("/docs", include_in_schema=False)
    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(render(app.openapi()))


def render(description: dict[str, Any]) -> str:
    """An OpenAPI description as a page of plain HTML."""
    info = description["info"]
    operations = [
        _operation(method, path, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(info["title"])}: the service's operations</title>
<link rel="icon" href="static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="static/page.css">
</head>
<body>
<header>
  <h1>{escape(info["title"])} {escape(info["version"])}</h1>
  <p>{escape(info.get("summary", ""))}</p>
  <p class="model">For programs: <a href="openapi.json">openapi.json</a>.
  For images: <a href="./">the page</a>.</p>
</header>
<main>
{"".join(operations)}</main>
</body>
</html>
"""


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [
        (parameter["name"], _limits(parameter["schema"]), parameter.get("description", ""))
        for parameter in operation.get("parameters", ())
    ]
    bodies = ", ".join(operation.get("requestBody", {}).get("content", ()))
    answers = [
        (status, "", response.get("description", ""))
        for status, response in operation["responses"].items()
    ]
    title = escape(f"{method.upper()} {path}")
    return f"""<section class="card">
<h2>{title}</h2>
<p>{escape(operation.get("summary", ""))}</p>
<p class="note">{escape(operation.get("description", ""))}</p>
{f"<p>Body: {escape(bodies)}</p>" if bodies else ""}
{_table("Parameters", rows)}{_table("Answers", answers)}</section>
"""


def _limits(schema: dict[str, Any]) -> str:
    words = [str(schema.get("type", ""))]
    if "minimum" in schema and "maximum" in schema:
        words.append(f"from {schema['minimum']} to {schema['maximum']}")
    if "default" in schema:
        words.append(f"default {schema['default']}")
    return ", ".join(filter(None, words))


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    if not rows:
        return ""
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        f"<td>{escape(kind)}</td><td>{escape(text)}</td></tr>\n"
        for name, kind, text in rows
    )
    return f'<div class="scroll"><table><caption>{title}</caption>\n{lines}</table></div>\n'
