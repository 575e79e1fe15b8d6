//! The report as a picture: perplexity, and how far from the reference, by how much context there was.

use plotters::chart::ChartBuilder;
use plotters::coord::Shift;
use plotters::coord::combinators::IntoLogRange;
use plotters::prelude::*;

use super::report::{Group, Report};

/// Pixels.
const SIZE: (u32, u32) = (1200, 520);
/// Height of title and subtitle.
const HEAD: u32 = 84;
const INK: RGBColor = RGBColor(34, 40, 49);
const FAINT: RGBColor = RGBColor(110, 118, 129);
const GRID: RGBColor = RGBColor(228, 231, 235);
const SUBJECT: RGBColor = RGBColor(31, 111, 178);
const REFERENCE: RGBColor = RGBColor(196, 84, 30);
/// Room above the highest point and beside the outer ones, as a factor.
const MARGIN: f64 = 1.25;

/// A line of a panel: its color and its points, by tokens of context.
type Line = (RGBColor, Vec<(f64, f64)>);

/// Draws `report` as SVG.
pub fn draw(report: &Report) -> anyhow::Result<String> {
    let line = |value: &dyn Fn(&Group) -> Option<f64>| -> Vec<(f64, f64)> {
        let groups = report.by_context.iter();
        groups.filter_map(|group| Some((group.context as f64, value(group)?))).collect()
    };
    let perplexity = line(&|group| Some(group.totals.perplexity));
    let theirs = line(&|group| Some(group.totals.compared?.perplexity));
    let divergence = line(&|group| Some(group.totals.compared?.divergence?.mean));
    let other = line(&|group| Some(100.0 - group.totals.compared?.same_top_percent));
    let mut panels: Vec<(&str, Vec<Line>)> = vec![(
        "Perplexity: blue, and of the reference: red",
        vec![(REFERENCE, theirs), (SUBJECT, perplexity)],
    )];
    if !divergence.is_empty() {
        panels.push(("Mean divergence from the reference, nats", vec![(SUBJECT, divergence)]));
    } else if !other.is_empty() {
        panels.push(("Positions with another top token, %", vec![(SUBJECT, other)]));
    }
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let (head, body) = area.split_vertically(HEAD);
        let title = format!("{}: {} positions of {}", report.model, report.all.positions, report.text);
        head.draw(&Text::new(title, (28, 20), font(22, INK)))?;
        let below = match &report.reference {
            Some(reference) => format!("{} against {reference}", report.subject),
            None => report.subject.clone(),
        };
        head.draw(&Text::new(below, (28, 54), font(15, FAINT)))?;
        for (area, (title, lines)) in body.split_evenly((1, panels.len())).iter().zip(&panels) {
            draw_panel(area, title, lines)?;
        }
        area.present()?;
    }
    Ok(svg)
}

fn draw_panel(area: &DrawingArea<SVGBackend<'_>, Shift>, title: &str, lines: &[Line]) -> anyhow::Result<()> {
    area.draw(&Text::new(title.to_owned(), (28, 6), font(17, INK)))?;
    let points = || lines.iter().flat_map(|(_, points)| points);
    let last = points().map(|(context, _)| *context).fold(1.0, f64::max);
    let top = points().map(|(_, value)| *value).fold(f64::MIN_POSITIVE, f64::max);
    let mut chart = ChartBuilder::on(area)
        .margin_top(38)
        .margin_right(32)
        .margin_bottom(14)
        .margin_left(18)
        .x_label_area_size(52)
        .y_label_area_size(78)
        .build_cartesian_2d((1.0 / MARGIN..last * MARGIN).log_scale(), 0.0..top * MARGIN)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(GRID)
        .x_desc("tokens of context")
        .axis_desc_style(font(15, FAINT))
        .label_style(font(14, INK))
        .x_label_formatter(&|context| format!("{context:.0}"))
        .y_label_formatter(&|value| if top < 0.1 { format!("{value:.1e}") } else { format!("{value:.1}") })
        .draw()?;
    for (color, points) in lines {
        chart
            .draw_series(LineSeries::new(points.iter().copied(), ShapeStyle::from(color).stroke_width(3)))?;
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 4, color.filled())))?;
    }
    Ok(())
}

fn font(size: i32, color: RGBColor) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&color)
}
