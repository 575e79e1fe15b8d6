//! What the pictures of all commands have in common: a head of two lines, and panels side by side.

use plotters::coord::Shift;
use plotters::prelude::*;

/// Pixels.
const SIZE: (u32, u32) = (1200, 560);
/// Height of title and subtitle.
const HEAD: u32 = 84;
/// Of what is read first.
pub const INK: RGBColor = RGBColor(34, 40, 49);
/// Of what stands beside it.
pub const FAINT: RGBColor = RGBColor(110, 118, 129);
/// Of lines behind the figures.
pub const GRID: RGBColor = RGBColor(228, 231, 235);
/// Of the first kind of figures,
pub const BLUE: RGBColor = RGBColor(31, 111, 178);
/// and of the second.
pub const RED: RGBColor = RGBColor(196, 84, 30);

/// A part of a picture.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The picture as SVG: `panel` draws each of `panels`.
pub fn draw<P>(
    title: String,
    below: String,
    panels: &[P],
    panel: impl Fn(&Area<'_>, &P) -> anyhow::Result<()>,
) -> anyhow::Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let (head, body) = area.split_vertically(HEAD);
        head.draw(&Text::new(title, (28, 20), font(24, INK)))?;
        head.draw(&Text::new(below, (28, 54), font(15, FAINT)))?;
        for (area, one) in body.split_evenly((1, panels.len())).iter().zip(panels) {
            panel(area, one)?;
        }
        area.present()?;
    }
    Ok(svg)
}

/// Text of that size and color.
pub fn font(size: i32, color: RGBColor) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&color)
}
