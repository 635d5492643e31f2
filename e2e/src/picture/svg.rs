//! Writes the elements of an SVG document.

use std::fmt::Write as _;

/// The average width of a character, relative to the font size.
const CHARACTER: f64 = 0.55;

/// A rectangle of the picture.
#[derive(Clone, Copy, Debug)]
pub(super) struct Area {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) width: f64,
    pub(super) height: f64,
}

impl Area {
    pub(super) fn new(left: f64, top: f64, width: f64, height: f64) -> Self {
        Self {
            left,
            top,
            width,
            height,
        }
    }

    /// The area without its top `height` pixels.
    pub(super) fn below(self, height: f64) -> Self {
        Self::new(
            self.left,
            self.top + height,
            self.width,
            self.height - height,
        )
    }

    /// The area without a margin on the left, on the right and at the bottom.
    pub(super) fn narrowed(self, margin: f64) -> Self {
        Self::new(
            self.left + margin,
            self.top,
            self.width - 2.0 * margin,
            self.height - margin,
        )
    }

    pub(super) fn center(self) -> (f64, f64) {
        (self.left + self.width / 2.0, self.top + self.height / 2.0)
    }
}

/// The part of a text that is at the given position.
#[derive(Clone, Copy, Debug)]
pub(super) enum Anchor {
    Start,
    Middle,
    End,
}

/// An SVG document.
pub(super) struct Svg {
    document: String,
}

impl Svg {
    pub(super) fn new(width: f64, height: f64, title: &str) -> Self {
        let document = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
             height=\"{height:.0}\" role=\"img\" font-family=\"Inter, Helvetica, Arial, sans-serif\">\n\
             <title>{}</title>\n",
            escaped(title)
        );
        Self { document }
    }

    pub(super) fn rectangle(&mut self, area: Area, fill: &str, stroke: &str) {
        let _ = writeln!(
            self.document,
            "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{fill}\" stroke=\"{stroke}\"/>",
            area.left, area.top, area.width, area.height
        );
    }

    /// Writes a text with this font size and color.
    pub(super) fn text(
        &mut self,
        (x, y): (f64, f64),
        text: &str,
        (size, color): (f64, &str),
        anchor: Anchor,
    ) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.document,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size:.0}\" fill=\"{color}\" \
             text-anchor=\"{anchor}\">{}</text>",
            escaped(text)
        );
    }

    /// Draws connected lines between the points. A single point becomes a dot.
    pub(super) fn path(&mut self, points: &[(f64, f64)], color: &str, width: f64) {
        if let [(x, y)] = points {
            let _ = writeln!(
                self.document,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{width:.1}\" fill=\"{color}\"/>"
            );
            return;
        }
        let mut steps = String::new();
        for (x, y) in corners(points) {
            steps.push_str(if steps.is_empty() { "M" } else { "L" });
            let _ = write!(steps, "{x:.1},{y:.1}");
        }
        let _ = writeln!(
            self.document,
            "<path d=\"{steps}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"{width:.1}\"/>"
        );
    }

    pub(super) fn finished(mut self) -> String {
        self.document.push_str("</svg>\n");
        self.document
    }
}

/// Removes points that have the same height as both neighbors, because the line is the same without them.
fn corners(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let is_at = |point: Option<&(f64, f64)>, height: f64| {
        point.is_some_and(|(_, y)| (y - height).abs() < 0.05)
    };
    let kept = points.iter().enumerate().filter(|(index, (_, y))| {
        let before = index.checked_sub(1).and_then(|index| points.get(index));
        !(is_at(before, *y) && is_at(points.get(index + 1), *y))
    });
    kept.map(|(_, point)| *point).collect()
}

/// The width of a text, estimated from its number of characters.
pub(super) fn width(text: &str, size: f64) -> f64 {
    text.chars().map(|_| CHARACTER * size).sum()
}

/// The text, shortened with an ellipsis if it is wider than `limit`.
pub(super) fn cut(text: &str, limit: f64, size: f64) -> String {
    if width(text, size) <= limit {
        return text.to_owned();
    }
    let mut kept = String::new();
    for character in text.chars() {
        if width(&kept, size) + 2.0 * CHARACTER * size > limit {
            break;
        }
        kept.push(character);
    }
    kept + "…"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_truncated_to_given_width() {
        assert_eq!(cut("short", 100.0, 10.0), "short");
        let found = cut("a very long name of a pod", 60.0, 10.0);
        assert!(
            found.ends_with('…') && width(&found, 10.0) <= 60.0,
            "{found}"
        );
    }

    #[test]
    fn horizontal_lines_keep_only_end_points() {
        let flat = [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (3.0, 5.0)];
        assert_eq!(corners(&flat), [(0.0, 1.0), (2.0, 1.0), (3.0, 5.0)]);
    }

    #[test]
    fn single_points_become_dots() {
        let mut svg = Svg::new(10.0, 10.0, "a & b");
        svg.path(&[(1.0, 2.0)], "red", 1.5);
        let text = svg.finished();
        assert!(
            text.contains("<circle") && !text.contains("<path"),
            "{text}"
        );
        assert!(text.contains("a &amp; b"), "{text}");
    }
}
