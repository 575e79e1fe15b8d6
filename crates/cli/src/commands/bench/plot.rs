//! The report as a picture: prefill against prompt length, decode against depth, each under its limit.

use plotters::chart::ChartBuilder;
use plotters::coord::combinators::{BindKeyPoints, IntoLogRange};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::report::{Floor, Report, Speed};
use crate::picture::{self, Area, BLUE, FAINT, GRID, INK, RED, font};

const GIGA: f64 = 1e9;
/// Half the width of the bar at the end of a spread.
const CAP: i32 = 5;
/// Room above the highest point, as a factor.
const HEADROOM: f64 = 1.18;
/// Room beside the first and the last point, as a factor.
const MARGIN: f64 = 1.5;

/// One panel.
struct Panel {
    title: &'static str,
    below: &'static str,
    /// What the limit is made of.
    limit: String,
    color: RGBColor,
    points: Vec<(usize, Speed, Option<Floor>)>,
}

/// Draws `report` as SVG.
pub fn draw(report: &Report) -> anyhow::Result<String> {
    let prefill = report.prefill.iter().map(|p| (p.tokens, p.tokens_per_second, p.floor));
    let decode = report.decode.iter().map(|d| (d.depth, d.tokens_per_second, d.floor));
    let panels = [
        Panel {
            title: "Prefill, tokens/s",
            below: "prompt length, tokens",
            limit: match report.limits.and_then(|limits| limits.matrix_ops_per_second) {
                Some(ops) => format!("limit: matrix products at {:.0} GOP/s", ops / GIGA),
                None => String::new(),
            },
            color: BLUE,
            points: prefill.collect(),
        },
        Panel {
            title: "Decode, tokens/s",
            below: "context depth, tokens",
            limit: match report.limits {
                Some(limits) => {
                    format!("limit: memory read at {:.1} GB/s", limits.read_bytes_per_second / GIGA)
                }
                None => String::new(),
            },
            color: RED,
            points: decode.collect(),
        },
    ];
    let title = format!("{}: prefill and decode with Lily {}", report.model, report.lily);
    let day = report.date.split('T').next().unwrap_or_default();
    let below = format!("{} · {} · {day}", report.machine.cpu, report.backend);
    picture::draw(title, below, &panels, draw_panel)
}

fn draw_panel(area: &Area<'_>, panel: &Panel) -> anyhow::Result<()> {
    area.draw(&Text::new(panel.title, (28, 6), font(18, panel.color)))?;
    let Some((first, ..)) = panel.points.first() else {
        area.draw(&Text::new("not measured", (28, 40), font(15, FAINT)))?;
        return Ok(());
    };
    let lengths: Vec<f64> = panel.points.iter().map(|(length, ..)| *length as f64).collect();
    let last = lengths.iter().copied().fold(0.0, f64::max);
    let top = panel
        .points
        .iter()
        .flat_map(|(_, speed, floor)| [speed.highest, floor.map_or(0.0, |floor| floor.tokens_per_second)])
        .fold(0.0, f64::max);
    let x = (*first as f64 / MARGIN..last * MARGIN).log_scale().with_key_points(lengths);
    let mut chart = ChartBuilder::on(area)
        .margin_top(38)
        .margin_right(32)
        .margin_bottom(14)
        .margin_left(18)
        .x_label_area_size(52)
        .y_label_area_size(58)
        .build_cartesian_2d(x, 0.0..top * HEADROOM)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(GRID)
        .x_desc(panel.below)
        .axis_desc_style(font(15, FAINT))
        .label_style(font(14, INK))
        .x_label_formatter(&|length| short(*length))
        .y_label_formatter(&|speed| format!("{speed:.0}"))
        .y_labels(7)
        .draw()?;

    let floors: Vec<(f64, f64)> = panel
        .points
        .iter()
        .filter_map(|(length, _, floor)| Some((*length as f64, floor.as_ref()?.tokens_per_second)))
        .collect();
    let dashed = ShapeStyle::from(&FAINT).stroke_width(2);
    if let (Some(&(first, left)), Some(&(last, right))) = (floors.first(), floors.last()) {
        // Out to the frame on both sides, so that one length alone has a line too.
        let line = [(first / MARGIN, left)].into_iter().chain(floors).chain([(last * MARGIN, right)]);
        chart.draw_series(DashedLineSeries::new(line, 7, 5, dashed))?;
        let label = EmptyElement::at((first / MARGIN, left))
            + Text::new(panel.limit.clone(), (10, -20), font(14, FAINT));
        chart.draw_series([label])?;
    }
    let medians = panel.points.iter().map(|(length, speed, _)| (*length as f64, speed.median));
    chart.draw_series(LineSeries::new(medians, ShapeStyle::from(&panel.color).stroke_width(3)))?;
    for (length, speed, floor) in &panel.points {
        let x = *length as f64;
        let thin = ShapeStyle::from(&panel.color).stroke_width(2);
        chart.draw_series([PathElement::new(vec![(x, speed.lowest), (x, speed.highest)], thin)])?;
        for end in [speed.lowest, speed.highest] {
            let cap = EmptyElement::at((x, end)) + PathElement::new(vec![(-CAP, 0), (CAP, 0)], thin);
            chart.draw_series([cap])?;
        }
        let part = floor.map_or(String::new(), |floor| format!(" ({:.0} %)", 100.0 * floor.fraction));
        let label = format!("{}{part}", figure(speed.median));
        let dot = EmptyElement::at((x, speed.median)) + Circle::new((0, 0), 5, panel.color.filled());
        chart.draw_series([dot])?;
        let above = font(14, INK).pos(Pos::new(HPos::Center, VPos::Bottom));
        let label = EmptyElement::at((x, speed.highest)) + Text::new(label, (0, -10), above);
        chart.draw_series([label])?;
    }
    Ok(())
}

/// Three figures.
fn figure(value: f64) -> String {
    let decimals = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.decimals$}")
}

/// Lengths as people write them: 256, 4K.
fn short(length: f64) -> String {
    const K: usize = 1 << 10;
    let length = length.round() as usize;
    if length >= K && length.is_multiple_of(K) { format!("{}K", length / K) } else { length.to_string() }
}
