"""Speclab's look: ink on paper, one type scale, system fonts (nothing is fetched)."""

from __future__ import annotations

from pathlib import Path

import gradio as gr

STYLESHEET = Path(__file__).with_name("speclab.css")

SANS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Cantarell", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "DejaVu Sans Mono", "monospace"]


def theme() -> gr.themes.Base:
    """The theme; what is Speclab's own is in `speclab.css`, on the same variables."""
    base = gr.themes.Base(
        primary_hue=gr.themes.colors.blue,
        neutral_hue=gr.themes.colors.gray,
        text_size=gr.themes.sizes.text_sm,
        spacing_size=gr.themes.sizes.spacing_sm,
        radius_size=gr.themes.sizes.radius_sm,
        font=SANS,
        font_mono=MONO,
    )
    return base.set(
        body_background_fill="#f7f8fa",
        body_background_fill_dark="#0f1217",
        body_text_color="#1b2028",
        body_text_color_dark="#e4e8ee",
        body_text_color_subdued="#5c6675",
        body_text_color_subdued_dark="#97a1b0",
        background_fill_primary="#ffffff",
        background_fill_primary_dark="#161a21",
        background_fill_secondary="#f1f3f6",
        background_fill_secondary_dark="#1c212a",
        border_color_primary="#dfe3e9",
        border_color_primary_dark="#2a313c",
        block_background_fill="*background_fill_primary",
        block_background_fill_dark="*background_fill_primary",
        checkbox_label_background_fill="transparent",
        checkbox_label_background_fill_dark="transparent",
        checkbox_label_background_fill_hover="*background_fill_secondary",
        checkbox_label_background_fill_selected="*background_fill_secondary",
        checkbox_label_background_fill_selected_dark="*background_fill_secondary",
        checkbox_label_shadow="none",
        block_border_width="1px",
        block_shadow="none",
        block_radius="10px",
        container_radius="10px",
        input_radius="6px",
        button_large_radius="8px",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_label_border_width="0px",
        block_label_text_color="*body_text_color_subdued",
        block_title_text_weight="600",
        block_title_text_color="*body_text_color",
        block_info_text_color="*body_text_color_subdued",
        block_padding="12px 14px",
        input_background_fill="#ffffff",
        input_background_fill_dark="#10141a",
        input_border_width="1px",
        input_border_width_dark="1px",
        input_border_color="#c9d0da",
        input_border_color_dark="#39424f",
        input_border_color_focus="#0072b2",
        input_border_color_focus_dark="#56b4e9",
        input_shadow="none",
        input_shadow_focus="0 0 0 2px color-mix(in srgb, #0072b2 35%, transparent)",
        button_primary_background_fill="#1b2028",
        button_primary_background_fill_hover="#343c48",
        button_primary_text_color="#ffffff",
        button_primary_background_fill_dark="#e4e8ee",
        button_primary_background_fill_hover_dark="#ffffff",
        button_primary_text_color_dark="#12161c",
        button_secondary_background_fill="transparent",
        button_secondary_background_fill_hover="*background_fill_secondary",
        button_secondary_border_color="*input_border_color",
        button_border_width="1px",
        button_border_width_dark="1px",
        button_primary_border_color="transparent",
        button_primary_border_color_dark="transparent",
        button_primary_shadow="none",
        button_secondary_shadow="none",
        button_large_padding="9px 18px",
        button_large_text_size="*text_md",
        button_large_text_weight="600",
        button_transition="background-color 0.12s ease",
        layout_gap="14px",
        form_gap_width="1px",
    )
