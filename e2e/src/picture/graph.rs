//! Draws the lines of a panel, with axes and a legend.

use serde_json::Value;

use super::data::{Line, Span};
use super::svg::{self, Anchor, Area, Svg};
use super::{BORDER, TEXT, WEAK_TEXT, axis, unit};

/// The colors of the lines: Grafana's classic palette.
const COLORS: [&str; 12] = [
    "#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0",
    "#508642", "#cca300", "#447ebc", "#c15c17",
];
/// The width of the numbers on the left of the graph, and the height of the times below it.
const LEFT: f64 = 62.0;
const BELOW: f64 = 20.0;
/// The height of a line of the legend, and the maximum number of these lines.
const LEGEND: f64 = 18.0;
const LEGEND_LINES: usize = 2;
/// The font size of the axes and of the legend.
const SIZE: f64 = 11.0;
/// Two points are connected if their distance is at most this multiple of [`Span::step`]. Between points with a larger
/// distance, the line has a gap.
const GAP: f64 = 2.5;

/// An entry of the legend, and its position.
struct Entry<'a> {
    x: f64,
    line: usize,
    name: &'a str,
    color: &'a str,
}

/// Draws the graph in the area.
pub(super) fn draw(svg: &mut Svg, area: Area, config: &Value, lines: &[Line], span: Span) {
    let unit = config["unit"].as_str().unwrap_or_default();
    let colors = COLORS.iter().copied().cycle();
    let colored: Vec<(&Line, &str)> = lines.iter().zip(colors).collect();
    let entries = legend(&colored, area.width);
    let rows = entries.iter().map(|entry| entry.line + 1).max();
    let height: f64 = (0..rows.unwrap_or_default()).map(|_| LEGEND).sum();
    let plot = Area::new(
        area.left + LEFT,
        area.top + 4.0,
        area.width - LEFT - 6.0,
        area.height - BELOW - 4.0 - height,
    );
    let marks = value_marks(config, unit, lines);
    let (low, high) = ends(&marks);
    let x = |time: f64| plot.left + (time - span.start) / (span.end - span.start) * plot.width;
    let y = |value: f64| {
        let share = (value.clamp(low, high) - low) / (high - low);
        plot.top + plot.height - share * plot.height
    };
    for mark in &marks {
        let place = y(*mark);
        svg.path(
            &[(plot.left, place), (plot.left + plot.width, place)],
            BORDER,
            1.0,
        );
        let text = unit::shown(unit, *mark);
        let style = (SIZE, WEAK_TEXT);
        svg.text((plot.left - 6.0, place + 4.0), &text, style, Anchor::End);
    }
    for mark in axis::times(span.start, span.end) {
        let place = (x(mark), plot.top + plot.height + 14.0);
        let style = (SIZE, WEAK_TEXT);
        svg.text(place, &axis::clock(mark), style, Anchor::Middle);
    }
    for (line, color) in &colored {
        for part in parts(&line.points, span.step() * GAP) {
            let points: Vec<(f64, f64)> = part
                .iter()
                .map(|(time, value)| (x(*time), y(*value)))
                .collect();
            svg.path(&points, color, 1.5);
        }
    }
    let first = plot.top + plot.height + BELOW + 11.0;
    for entry in entries {
        let line: f64 = first + (0..entry.line).map(|_| LEGEND).sum::<f64>();
        let place = area.left + entry.x;
        let swatch = Area::new(place, line - 6.0, 12.0, 3.0);
        svg.rectangle(swatch, entry.color, "none");
        svg.text(
            (place + 17.0, line),
            entry.name,
            (SIZE, TEXT),
            Anchor::Start,
        );
    }
}

/// The marks of the value axis, from the limits in the panel's settings. Without limits, from the smallest to the
/// largest value.
fn value_marks(config: &Value, unit: &str, lines: &[Line]) -> Vec<f64> {
    let values = || {
        lines
            .iter()
            .flat_map(|line| &line.points)
            .map(|(_, it)| *it)
    };
    let low = config["min"].as_f64();
    let low = low.unwrap_or_else(|| values().fold(f64::INFINITY, f64::min));
    let high = config["max"].as_f64();
    let high = high.unwrap_or_else(|| values().fold(low, f64::max));
    let smallest = if config["decimals"] == 0 { 1.0 } else { 0.0 };
    axis::values(low, high, unit::scale(unit, high), smallest)
}

/// The lower and the upper end of the value axis.
fn ends(marks: &[f64]) -> (f64, f64) {
    let low = marks.first().copied().unwrap_or_default();
    let high = marks.last().copied().unwrap_or_default();
    (low, if high > low { high } else { low + 1.0 })
}

/// Splits a line at its gaps, where the distance of two points exceeds `limit`.
fn parts(points: &[(f64, f64)], limit: f64) -> impl Iterator<Item = &[(f64, f64)]> {
    points.chunk_by(move |before, after| after.0 - before.0 <= limit)
}

/// The entries of the legend. Entries that do not fit are omitted.
fn legend<'a>(colored: &[(&'a Line, &'a str)], limit: f64) -> Vec<Entry<'a>> {
    let (mut x, mut line) = (0.0, 0);
    let mut entries = Vec::new();
    for (one, color) in colored {
        let width = svg::width(&one.name, SIZE) + 40.0;
        if x > 0.0 && x + width > limit {
            (x, line) = (0.0, line + 1);
        }
        if line == LEGEND_LINES {
            break;
        }
        entries.push(Entry {
            x,
            line,
            name: &one.name,
            color,
        });
        x += width;
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_has_gap_where_samples_are_missing() {
        let points = [(0.0, 1.0), (1.0, 1.0), (5.0, 2.0)];
        let found: Vec<usize> = parts(&points, 2.5).map(<[_]>::len).collect();
        assert_eq!(found, [2, 1]);
    }

    #[test]
    fn legend_omits_entries_that_do_not_fit() {
        let line = |name: &str| Line {
            name: name.into(),
            points: Vec::new(),
        };
        let lines = [line("first"), line("second"), line("third")];
        let colored: Vec<(&Line, &str)> = lines.iter().map(|line| (line, "red")).collect();
        let lines: Vec<usize> = legend(&colored, 80.0).iter().map(|it| it.line).collect();
        assert_eq!(lines, [0, 1]);
        assert_eq!(legend(&colored, 1000.0).len(), 3);
    }
}
