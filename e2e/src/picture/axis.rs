//! Chooses the values and times at which the axes of a graph have marks.

/// Possible distances between two marks of a time axis, in seconds.
const TIME_STEPS: [f64; 9] = [
    60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 21600.0,
];
/// The maximum number of intervals on a time axis, and the approximate number on a value axis.
const TIME_MARKS: f64 = 6.0;
const VALUE_MARKS: f64 = 4.0;

/// The marks of a value axis, from its lower to its upper end. `scale` is the size of the axis's unit, such as 1024 for
/// KiB. `smallest` is the minimum distance between two marks, in this unit.
pub(super) fn values(low: f64, high: f64, scale: f64, smallest: f64) -> Vec<f64> {
    let (low, high) = (low / scale, high / scale);
    let high = if high > low { high } else { low + 1.0 };
    let rough = (high - low) / VALUE_MARKS;
    let power = 10f64.powf(rough.log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    let factor = factors.into_iter().find(|it| it * power >= rough * 0.999);
    let step = smallest.max(factor.unwrap_or(10.0) * power);
    let first = (low / step).floor() * step;
    let last = (high / step - 0.001).ceil() * step;
    marks(first, last, step).map(|mark| mark * scale).collect()
}

/// The marks of a time axis, in Unix seconds.
pub(super) fn times(start: f64, end: f64) -> Vec<f64> {
    let fits = |step: &f64| (end - start) / step <= TIME_MARKS;
    let step = TIME_STEPS.into_iter().find(fits).unwrap_or(86400.0);
    marks((start / step).ceil() * step, end, step).collect()
}

fn marks(first: f64, last: f64, step: f64) -> impl Iterator<Item = f64> {
    let all = std::iter::successors(Some(first), move |mark| Some(mark + step));
    all.take_while(move |mark| *mark <= last + step * 0.001)
}

/// The time of day in UTC, such as `07:42`.
pub(super) fn clock(time: f64) -> String {
    let minutes = (time / 60.0).floor() % 1440.0;
    format!("{:02.0}:{:02.0}", (minutes / 60.0).floor(), minutes % 60.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(marks: &[f64]) -> Vec<String> {
        marks.iter().map(|mark| format!("{mark:.1}")).collect()
    }

    #[test]
    fn value_axis_has_round_marks_that_cover_all_values() {
        assert_eq!(
            shown(&values(0.0, 17.0, 1.0, 0.0)),
            ["0.0", "5.0", "10.0", "15.0", "20.0"]
        );
        assert_eq!(
            shown(&values(0.0, 3000.0, 1024.0, 0.0)),
            ["0.0", "1024.0", "2048.0", "3072.0"]
        );
        assert_eq!(shown(&values(0.0, 0.0, 1.0, 0.0)), ["0.0", "0.5", "1.0"]);
        assert_eq!(shown(&values(0.0, 1.0, 1.0, 1.0)), ["0.0", "1.0"]);
    }

    #[test]
    fn time_axis_has_marks_at_full_minutes() {
        let marks = times(36_010.0, 36_610.0);
        let found: Vec<String> = marks.into_iter().map(clock).collect();
        assert_eq!(found, ["10:02", "10:04", "10:06", "10:08", "10:10"]);
    }
}
