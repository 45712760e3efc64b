"""Gradio's theme, in colours that are CSS variables (assets/style.css), so that light and dark share one theme."""

import gradio as gr

SYSTEM_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif")
MONO_FONTS = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace")
# The theme's variables that use each of the page's colours.
COLOURS = {
    "bg": "body_background_fill",
    "text": """body_text_color button_secondary_text_color checkbox_label_text_color
        checkbox_label_text_color_selected""",
    "muted": """body_text_color_subdued block_label_text_color block_title_text_color block_info_text_color
        input_placeholder_color checkbox_border_color""",
    "surface": """background_fill_primary block_background_fill block_label_background_fill input_background_fill
        button_secondary_background_fill checkbox_background_color checkbox_label_background_fill""",
    "raised": "background_fill_secondary button_secondary_background_fill_hover",
    "line": """block_border_color border_color_primary input_border_color button_secondary_border_color
        checkbox_label_border_color table_border_color""",
    "accent": """border_color_accent color_accent input_border_color_focus button_primary_background_fill
        button_primary_background_fill_hover checkbox_background_color_selected checkbox_label_border_color_selected
        link_text_color slider_color""",
    "accent-soft": "color_accent_soft checkbox_label_background_fill_selected",
    "on-accent": "button_primary_text_color",
}


def page_theme() -> gr.themes.Base:
    """The theme. It uses the system's fonts, so none is downloaded."""
    theme = gr.themes.Base(
        primary_hue="teal",
        neutral_hue="stone",
        radius_size="md",
        spacing_size="sm",
        font=[gr.themes.Font(name) for name in SYSTEM_FONTS],
        font_mono=[gr.themes.Font(name) for name in MONO_FONTS],
    )
    light = {name: f"var(--rb-{colour})" for colour, names in COLOURS.items() for name in names.split()}
    dark = {f"{name}_dark": value for name, value in light.items() if hasattr(theme, f"{name}_dark")}
    return theme.set(
        block_shadow="none",
        block_shadow_dark="none",
        input_border_width="1px",
        input_border_width_dark="1px",
        button_primary_shadow="none",
        **light,
        **dark,
    )
