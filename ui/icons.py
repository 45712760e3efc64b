"""The page's icons: 16-pixel strokes in the text's colour, drawn here so that nothing is fetched."""


def _icon(paths: str) -> str:
    return (
        '<svg class="rb-icon" viewBox="0 0 16 16" width="16" height="16" fill="none" stroke="currentColor" '
        f'stroke-width="1.5" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">{paths}</svg>'
    )


EDIT = _icon('<path d="M10.8 2.7l2.5 2.5L5.6 12.9l-3.1.6.6-3.1z"/>')
COPY = _icon(
    '<rect x="5.5" y="5.5" width="8" height="8" rx="1.5"/><path d="M10.5 3.2V3A.9.9 0 0 0 9.6 '
    '2.1H3A.9.9 0 0 0 2.1 3v6.6a.9.9 0 0 0 .9.9h.2"/>'
)
AGAIN = _icon('<path d="M13.5 8A5.5 5.5 0 1 1 11.6 3.8"/><path d="M13.6 1.9v2.7h-2.7"/>')
GAUGE = _icon('<path d="M2.3 11.5a6 6 0 1 1 11.4 0"/><path d="M8 9.5l2.7-3.2"/>')
BIN = _icon('<path d="M3 4.5h10M6.3 4.5V2.8h3.4v1.7M4.3 4.5l.6 8.7h6.2l.6-8.7"/>')
RETRY = AGAIN
EYE = _icon(
    '<path d="M1.5 8S4 3.5 8 3.5 14.5 8 14.5 8 12 12.5 8 12.5 1.5 8 1.5 8z"/><circle cx="8" cy="8" r="2"/>'
)
CLOSE = _icon('<path d="M4 4l8 8M12 4l-8 8"/>')
