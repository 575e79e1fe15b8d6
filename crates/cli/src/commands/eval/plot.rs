//! The report as a picture: perplexity, and how far from the reference, by how much context there was.

use plotters::chart::ChartBuilder;
use plotters::coord::combinators::IntoLogRange;
use plotters::prelude::*;

use super::report::{Group, Report};
use crate::picture::{self, Area, BLUE, FAINT, GRID, INK, RED, font};

/// Room above the highest point and beside the outer ones, as a factor.
const MARGIN: f64 = 1.25;

/// A line of a panel: its color and its points, by tokens of context.
type Line = (RGBColor, Vec<(f64, f64)>);
/// Title and lines.
type Panel = (&'static str, Vec<Line>);

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
    let mut panels: Vec<Panel> =
        vec![("Perplexity: blue, and of the reference: red", vec![(RED, theirs), (BLUE, perplexity)])];
    if !divergence.is_empty() {
        panels.push(("Mean divergence from the reference, nats", vec![(BLUE, divergence)]));
    } else if !other.is_empty() {
        panels.push(("Positions with another top token, %", vec![(BLUE, other)]));
    }
    let title = format!("{}: {} positions of {}", report.model, report.all.positions, report.text);
    let below = match &report.reference {
        Some(reference) => format!("{} against {reference}", report.subject),
        None => report.subject.clone(),
    };
    picture::draw(title, below, &panels, draw_panel)
}

fn draw_panel(area: &Area<'_>, (title, lines): &Panel) -> anyhow::Result<()> {
    area.draw(&Text::new(*title, (28, 6), font(17, INK)))?;
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
