//! What is wrong with an object, for people: the field, the problem, the remedy.

use std::fmt;

use crate::duration::DurationText;
use crate::names::{MAX_CLUSTER_NAME, is_cluster_name};

/// One thing wrong with an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// JSON path of the field, such as `spec.s3.path`.
    pub field: String,
    /// What is wrong with it.
    pub problem: String,
    /// What to do about it.
    pub remedy: String,
}

impl Problem {
    /// A problem with `field`.
    pub fn new(
        field: impl Into<String>,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            field: field.into(),
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }

    /// A text that is none of those this release knows.
    pub(crate) fn unknown(field: impl Into<String>, text: &str, known: &[&str]) -> Self {
        Self::new(
            field,
            format!("is {text:?}, which is not known"),
            format!("use one of {}", known.join(", ")),
        )
    }

    /// A text that should be a duration, if it is none.
    pub(crate) fn no_duration(
        field: impl Into<String>,
        text: Option<&DurationText>,
    ) -> Option<Self> {
        let text = text.filter(|text| text.parse().is_none())?;
        Some(Self::new(
            field,
            format!("is {:?}, which is no duration", text.0),
            "write it as in 60s, 5m or 24h",
        ))
    }

    /// A name that no cluster can have, if it is one.
    pub(crate) fn no_cluster_name(field: impl Into<String>, name: &str) -> Option<Self> {
        (!is_cluster_name(name)).then(|| {
            Self::new(
                field,
                format!("is {name:?}, which Services cannot be named after"),
                format!("use a DNS-1035 label (letters, digits, dashes; a letter first) of at most {MAX_CLUSTER_NAME} characters"),
            )
        })
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} {}: {}",
            self.field, self.problem, self.remedy
        )
    }
}

/// All problems in one line, for a condition's message.
pub fn summary(problems: &[Problem]) -> String {
    let lines: Vec<String> = problems.iter().map(Problem::to_string).collect();
    lines.join("; ")
}

/// The fields that are set, of those that stand beside whether they are.
pub(crate) fn those_set<const N: usize>(fields: [(bool, &str); N]) -> Vec<String> {
    let set = fields.into_iter().filter(|(set, _)| *set);
    set.map(|(_, field)| field.to_owned()).collect()
}

/// The fields that have problems, in their order.
#[cfg(test)]
pub(crate) fn fields(problems: &[Problem]) -> Vec<&str> {
    let fields = problems.iter().map(|problem| problem.field.as_str());
    fields.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_names_field_problem_and_remedy() {
        let problem = Problem::new("spec.size", "is 9", "use 1 to 7");
        assert_eq!(problem.to_string(), "spec.size is 9: use 1 to 7");
        assert_eq!(
            summary(&[problem.clone(), problem]),
            "spec.size is 9: use 1 to 7; spec.size is 9: use 1 to 7"
        );
    }
}
