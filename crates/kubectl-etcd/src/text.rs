//! Tables, colors, sizes and times for people. Performs no I/O.

pub use api::display::bytes;
use jiff::Timestamp;

/// The meaning of a text for the user. On a terminal, each meaning has a color.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// Without color.
    #[default]
    Plain,
    /// A desired state.
    Good,
    /// A state that a user should check.
    Warning,
    /// A problem.
    Bad,
    /// Less important text.
    Faint,
    /// A heading.
    Bold,
}

/// Whether the output has colors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paint(pub bool);

impl Paint {
    /// The text in the color of its tone.
    pub fn paint(self, text: &str, tone: Tone) -> String {
        let code = match tone {
            Tone::Plain => return text.to_owned(),
            Tone::Good => "32",
            Tone::Warning => "33",
            Tone::Bad => "31",
            Tone::Faint => "2",
            Tone::Bold => "1",
        };
        if self.0 && !text.is_empty() {
            format!("\u{1b}[{code}m{text}\u{1b}[0m")
        } else {
            text.to_owned()
        }
    }
}

/// A cell of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// A cell with this text and tone.
    pub fn new(text: impl Into<String>, tone: Tone) -> Self {
        Self {
            text: text.into(),
            tone,
        }
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self::new(text, Tone::Plain)
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self::new(text, Tone::Plain)
    }
}

/// A table. It shows `-` for an empty cell.
#[derive(Clone, Debug, Default)]
pub struct Table {
    header: Vec<&'static str>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table with this header and no rows.
    pub fn new(header: &[&'static str]) -> Self {
        Self {
            header: header.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row, whose cells must be in the order of the header.
    pub fn add(&mut self, row: Vec<Cell>) {
        self.rows.push(row);
    }

    /// Whether the table has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The lines of the table, with aligned columns.
    pub fn render(&self, paint: Paint) -> String {
        let shown = |cell: &Cell| {
            if cell.text.is_empty() {
                "-".to_owned()
            } else {
                // A line break becomes a space, because it would break the table.
                cell.text.replace('\n', " ")
            }
        };
        let header: Vec<Cell> = self
            .header
            .iter()
            .map(|name| Cell::new(*name, Tone::Bold))
            .collect();
        let lines: Vec<&Vec<Cell>> = std::iter::once(&header).chain(&self.rows).collect();
        let widths: Vec<usize> = (0..self.header.len())
            .map(|column| {
                let cells = lines.iter().filter_map(|line| line.get(column));
                cells
                    .map(|cell| shown(cell).chars().count())
                    .max()
                    .unwrap_or_default()
            })
            .collect();
        let mut text = String::new();
        for line in lines {
            for (column, cell) in line.iter().enumerate() {
                let content = shown(cell);
                text.push_str(&paint.paint(&content, cell.tone));
                if column + 1 < line.len() {
                    let width = widths.get(column).copied().unwrap_or_default();
                    let gap = width.saturating_sub(content.chars().count()) + 3;
                    text.push_str(&" ".repeat(gap));
                }
            }
            text.push('\n');
        }
        text
    }
}

/// A duration in one unit, such as `45s`, `12m`, `5h` or `3d`. The unit is the largest unit of which the duration has
/// at least two: 90 minutes are `90m`, and two hours are `2h`.
pub fn duration(seconds: i64) -> String {
    match seconds.max(0) {
        seconds @ 0..120 => format!("{seconds}s"),
        seconds @ 120..7_200 => format!("{}m", seconds / 60),
        seconds @ 7_200..172_800 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

/// A time relative to `now`, such as `5h ago` or `in 12d`.
pub fn distance(time: Timestamp, now: Timestamp) -> String {
    let seconds = time.as_second() - now.as_second();
    if seconds > 0 {
        format!("in {}", duration(seconds))
    } else {
        format!("{} ago", duration(-seconds))
    }
}

/// A time in UTC without fractions of a second.
pub fn time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_aligns_columns_with_and_without_colors() {
        let mut table = Table::new(&["NAME", "STATE"]);
        table.add(vec!["main".into(), Cell::new("Ready", Tone::Good)]);
        table.add(vec!["ä".into(), "".into()]);
        assert_eq!(
            table.render(Paint(false)),
            "NAME   STATE\nmain   Ready\nä      -\n"
        );
        let colored = table.render(Paint(true));
        assert!(
            colored.contains("main   \u{1b}[32mReady\u{1b}[0m"),
            "{colored:?}"
        );
    }

    #[test]
    fn relative_times_distinguish_past_and_future() {
        let at = |second| Timestamp::from_second(second).unwrap();
        assert_eq!(distance(at(1000), at(1045)), "45s ago");
        assert_eq!(distance(at(1000 + 3 * 86_400), at(1000)), "in 3d");
        assert_eq!(duration(7_199), "119m");
        assert_eq!(duration(-5), "0s");
        assert_eq!(time(at(0)), "1970-01-01T00:00:00Z");
    }
}
