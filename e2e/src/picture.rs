//! Draws the Grafana dashboards of the chart as SVG pictures. The data comes from Prometheus.
//!
//! Grafana itself is not used, because no package registry has a build of it. This module supports only the types of
//! panels that the dashboards of the chart contain.

use anyhow::{Context, Result};
use serde_json::Value;

use crate::Prometheus;
use data::Data;
use svg::{Anchor, Area, Svg};

mod axis;
mod data;
mod graph;
mod svg;
mod unit;
mod value;

pub use data::Span;

/// The number of columns of Grafana's grid.
const COLUMNS: f64 = 24.0;
/// The width of a column and the height of a row of the grid, both including [`GAP`].
const CELL: (f64, f64) = (50.0, 36.0);
const GAP: f64 = 8.0;
/// The height of the line with the title of the dashboard.
const HEADER: f64 = 44.0;
/// The height of the line with the title of a panel.
const TITLE: f64 = 26.0;
/// The height of a row of a table.
const ROW: f64 = 24.0;
const BACKGROUND: &str = "#f4f5f5";
const BORDER: &str = "#dcdee0";
const TEXT: &str = "#24292e";
const WEAK_TEXT: &str = "#6e7681";

/// A drawn dashboard.
#[derive(Debug)]
pub struct Picture {
    /// The SVG document.
    pub svg: String,
    /// The titles of the panels that have no data.
    pub empty: Vec<String>,
}

/// Draws a dashboard. `fill` replaces Grafana's variables in the expressions of the panels.
///
/// # Errors
/// Fails if Prometheus does not respond, or if the dashboard has an unsupported type of panel.
pub async fn draw(
    prometheus: &Prometheus,
    dashboard: &Value,
    span: Span,
    fill: impl Fn(&str) -> String,
) -> Result<Picture> {
    let panels = dashboard["panels"].as_array().context("no panels")?;
    let mut all = Vec::new();
    for panel in panels {
        let data = data::read(prometheus, panel, span, &fill).await;
        all.push((panel, data.with_context(|| panel["title"].to_string())?));
    }
    Ok(drawn(dashboard, &all, span))
}

/// Draws the panels with their data.
fn drawn(dashboard: &Value, panels: &[(&Value, Data)], span: Span) -> Picture {
    let bottoms = panels.iter().map(|(panel, _)| {
        let area = area(panel);
        area.top + area.height
    });
    let (width, height) = (COLUMNS * CELL.0 + GAP, bottoms.fold(HEADER, f64::max) + GAP);
    let mut svg = Svg::new(width, height, text(dashboard, "title"));
    svg.rectangle(Area::new(0.0, 0.0, width, height), BACKGROUND, "none");
    let title = text(dashboard, "title");
    svg.text((GAP * 2.0, 28.0), title, (18.0, TEXT), Anchor::Start);
    let [from, to] = [span.start, span.end].map(axis::clock);
    let times = format!("{from} to {to} UTC");
    svg.text(
        (width - GAP * 2.0, 28.0),
        &times,
        (13.0, WEAK_TEXT),
        Anchor::End,
    );
    let mut empty = Vec::new();
    for (panel, data) in panels {
        let area = area(panel);
        svg.rectangle(area, "#ffffff", BORDER);
        let place = (area.left + 12.0, area.top + 18.0);
        let title = svg::cut(text(panel, "title"), area.width - 24.0, 13.0);
        svg.text(place, &title, (13.0, TEXT), Anchor::Start);
        let inner = area.below(TITLE).narrowed(10.0);
        if data.is_empty() {
            empty.push(text(panel, "title").to_owned());
            svg.text(inner.center(), "No data", (14.0, WEAK_TEXT), Anchor::Middle);
            continue;
        }
        let defaults = &panel["fieldConfig"]["defaults"];
        match data {
            Data::Number(None) => {}
            Data::Number(Some(number)) => {
                let (shown, color) = value::shown(defaults, *number);
                let (x, y) = inner.center();
                svg.text((x, y + 6.0), &shown, (30.0, color), Anchor::Middle);
            }
            Data::Table(table) => draw_table(&mut svg, inner, panel, table),
            Data::Lines(lines) => graph::draw(&mut svg, inner, defaults, lines, span),
        }
    }
    Picture {
        svg: svg.finished(),
        empty,
    }
}

/// The rectangle of a panel in the picture.
fn area(panel: &Value) -> Area {
    let place = |key: &str| panel["gridPos"][key].as_f64().unwrap_or_default();
    Area::new(
        GAP + place("x") * CELL.0,
        HEADER + place("y") * CELL.1,
        place("w") * CELL.0 - GAP,
        place("h") * CELL.1 - GAP,
    )
}

fn text<'a>(object: &'a Value, key: &str) -> &'a str {
    object[key].as_str().unwrap_or_default()
}

fn draw_table(svg: &mut Svg, area: Area, panel: &Value, table: &data::Table) {
    let width = area.width / table.columns.iter().map(|_| 1.0).sum::<f64>();
    let mut left = area.left;
    for (index, name) in table.columns.iter().enumerate() {
        let config = value::config(panel, name);
        let is_number = |row: &Vec<data::Cell>| matches!(row[index], data::Cell::Number(_));
        let is_numeric = table.rows.iter().any(is_number);
        let (x, anchor) = if is_numeric {
            (left + width - 8.0, Anchor::End)
        } else {
            (left + 4.0, Anchor::Start)
        };
        let mut line = area.top + 14.0;
        let cut = |shown: &str| svg::cut(shown, width - 12.0, 13.0);
        svg.text((x, line), &cut(name), (13.0, WEAK_TEXT), anchor);
        for row in &table.rows {
            line += ROW;
            if line > area.top + area.height {
                break;
            }
            let (shown, color) = match &row[index] {
                data::Cell::Label(label) => (label.clone(), TEXT),
                data::Cell::Number(number) => value::shown_in_table(&config, *number),
                data::Cell::Missing => continue,
            };
            svg.text((x, line), &cut(&shown), (13.0, color), anchor);
        }
        left += width;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::data::{Cell, Line, Table};
    use super::*;

    const SPAN: Span = Span {
        start: 36_000.0,
        end: 36_600.0,
    };

    fn panel(kind: &str, title: &str) -> Value {
        json!({
            "type": kind,
            "title": title,
            "gridPos": {"x": 0, "y": 0, "w": 12, "h": 8},
            "fieldConfig": {"defaults": {"unit": "bytes"}, "overrides": []},
        })
    }

    fn picture(panel: &Value, data: Data) -> Picture {
        drawn(&json!({"title": "etcd <fleet>"}), &[(panel, data)], SPAN)
    }

    #[test]
    fn picture_shows_title_and_time_range_and_values() {
        let found = picture(&panel("stat", "Database"), Data::Number(Some(2048.0)));
        assert!(found.empty.is_empty());
        for text in [
            ">etcd &lt;fleet&gt;<",
            ">10:00 to 10:10 UTC<",
            ">Database<",
            ">2 KiB<",
        ] {
            assert!(found.svg.contains(text), "{text}: {}", found.svg);
        }
        assert!(found.svg.ends_with("</svg>\n"), "{}", found.svg);
    }

    #[test]
    fn picture_shows_lines_with_legend() {
        let line = Line {
            name: "main".into(),
            points: vec![(36_000.0, 1024.0), (36_300.0, 4096.0), (36_600.0, 2048.0)],
        };
        let found = picture(
            &panel("timeseries", "Largest databases"),
            Data::Lines(vec![line]),
        );
        assert!(found.svg.contains("<path d=\"M"), "{}", found.svg);
        for text in [">main<", ">4 KiB<", ">10:04<"] {
            assert!(found.svg.contains(text), "{text}: {}", found.svg);
        }
    }

    #[test]
    fn picture_shows_rows_of_tables() {
        let table = Table {
            columns: vec!["cluster".into(), "Database".into()],
            rows: vec![
                vec![Cell::Label("main".into()), Cell::Number(1024.0)],
                vec![Cell::Label("other".into()), Cell::Missing],
            ],
        };
        let found = picture(&panel("table", "Clusters"), Data::Table(table));
        for text in [">cluster<", ">main<", ">1 KiB<", ">other<"] {
            assert!(found.svg.contains(text), "{text}: {}", found.svg);
        }
    }

    #[test]
    fn picture_names_panels_without_data() {
        for data in [Data::Number(None), Data::Lines(Vec::new())] {
            let found = picture(&panel("stat", "Nothing"), data);
            assert_eq!(found.empty, ["Nothing"]);
            assert!(found.svg.contains(">No data<"), "{}", found.svg);
        }
    }
}
