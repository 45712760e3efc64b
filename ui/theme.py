"""Gradio's theme in the page's own colours, which are CSS variables (assets/style.css), so light and dark are one."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import gradio as gr

SYSTEM = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
COLOURS = {
    "body_background_fill": "var(--rb-bg)",
    "body_text_color": "var(--rb-text)",
    "body_text_color_subdued": "var(--rb-muted)",
    "background_fill_primary": "var(--rb-surface)",
    "background_fill_secondary": "var(--rb-raised)",
    "block_background_fill": "var(--rb-surface)",
    "block_border_color": "var(--rb-line)",
    "block_label_background_fill": "var(--rb-surface)",
    "block_label_text_color": "var(--rb-muted)",
    "block_title_text_color": "var(--rb-muted)",
    "block_info_text_color": "var(--rb-muted)",
    "border_color_primary": "var(--rb-line)",
    "border_color_accent": "var(--rb-accent)",
    "color_accent": "var(--rb-accent)",
    "color_accent_soft": "var(--rb-accent-soft)",
    "input_background_fill": "var(--rb-surface)",
    "input_border_color": "var(--rb-line)",
    "input_border_color_focus": "var(--rb-accent)",
    "input_placeholder_color": "var(--rb-muted)",
    "button_primary_background_fill": "var(--rb-accent)",
    "button_primary_background_fill_hover": "var(--rb-accent)",
    "button_primary_text_color": "var(--rb-on-accent)",
    "button_secondary_background_fill": "var(--rb-surface)",
    "button_secondary_background_fill_hover": "var(--rb-raised)",
    "button_secondary_border_color": "var(--rb-line)",
    "button_secondary_text_color": "var(--rb-text)",
    "checkbox_background_color": "var(--rb-surface)",
    "checkbox_background_color_selected": "var(--rb-accent)",
    "checkbox_border_color": "var(--rb-muted)",
    "checkbox_label_background_fill": "var(--rb-surface)",
    "checkbox_label_background_fill_selected": "var(--rb-accent-soft)",
    "checkbox_label_border_color": "var(--rb-line)",
    "checkbox_label_border_color_selected": "var(--rb-accent)",
    "checkbox_label_text_color": "var(--rb-text)",
    "checkbox_label_text_color_selected": "var(--rb-text)",
    "link_text_color": "var(--rb-accent)",
    "slider_color": "var(--rb-accent)",
    "table_border_color": "var(--rb-line)",
}


def page_theme() -> "gr.themes.Base":
    """No font is fetched: the system's are used."""
    import gradio as gr

    theme = gr.themes.Base(
        primary_hue="teal",
        neutral_hue="stone",
        radius_size="md",
        spacing_size="sm",
        font=[gr.themes.Font(name) for name in SYSTEM],
        font_mono=[gr.themes.Font(name) for name in MONO],
    )
    both = COLOURS | {
        f"{name}_dark": value for name, value in COLOURS.items() if hasattr(theme, f"{name}_dark")
    }
    return theme.set(
        block_shadow="none",
        block_shadow_dark="none",
        input_border_width="1px",
        input_border_width_dark="1px",
        button_primary_shadow="none",
        **both,
    )
