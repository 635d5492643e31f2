//! Problems and errors as messages for users.

use std::error::Error;
use std::fmt;

use crate::duration::DurationText;
use crate::names::{MAX_CLUSTER_NAME, is_cluster_name};

/// A problem of one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The path of the field, such as `spec.s3.path`.
    pub field: String,
    /// The problem, as a phrase that follows the field, such as `is missing`.
    pub problem: String,
    /// The remedy, as an instruction.
    pub remedy: String,
}

impl Problem {
    /// Creates a problem of `field`.
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

    /// The problem of a field with an unknown value.
    pub(crate) fn unknown(field: impl Into<String>, text: &str, known: &[&str]) -> Self {
        Self::new(
            field,
            format!("has the unknown value {text:?}"),
            format!("use one of {}", known.join(", ")),
        )
    }

    /// The problem of an invalid duration. `None` for a valid or missing duration.
    pub(crate) fn invalid_duration(
        field: impl Into<String>,
        text: Option<&DurationText>,
    ) -> Option<Self> {
        let text = text.filter(|text| text.parse().is_none())?;
        Some(Self::new(
            field,
            format!("is {:?}, which is not a duration", text.0),
            "use a form such as 60s, 5m or 24h",
        ))
    }

    /// The problem of an invalid name of a cluster. `None` for a valid name.
    pub(crate) fn invalid_cluster_name(field: impl Into<String>, name: &str) -> Option<Self> {
        (!is_cluster_name(name)).then(|| {
            Self::new(
                field,
                format!("is {name:?}, which is not a valid prefix of Service names"),
                format!("use a DNS-1035 label of at most {MAX_CLUSTER_NAME} characters: lowercase letters, digits and dashes, beginning with a letter"),
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

/// Displays an error with its causes, each text only once.
pub struct Chain<'a>(pub &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        let mut cause = self.0.source();
        while let Some(error) = cause {
            // Some errors already include the text of their cause. Such a cause is not appended again.
            let next = error.to_string();
            if !text.contains(&next) {
                text.push_str(": ");
                text.push_str(&next);
            }
            cause = error.source();
        }
        formatter.write_str(&text)
    }
}

/// All problems in one line, for the message of a condition.
pub fn summary(problems: &[Problem]) -> String {
    let lines: Vec<String> = problems.iter().map(Problem::to_string).collect();
    lines.join("; ")
}

/// The names of the fields whose flag is true.
pub(crate) fn names_of_set<const N: usize>(fields: [(bool, &str); N]) -> Vec<String> {
    let set = fields.into_iter().filter(|(set, _)| *set);
    set.map(|(_, field)| field.to_owned()).collect()
}

#[cfg(test)]
pub(crate) fn fields(problems: &[Problem]) -> Vec<&str> {
    let fields = problems.iter().map(|problem| problem.field.as_str());
    fields.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problem_message_contains_field_problem_and_remedy() {
        let problem = Problem::new("spec.size", "is 9", "use 1 to 7");
        assert_eq!(problem.to_string(), "spec.size is 9: use 1 to 7");
        assert_eq!(
            summary(&[problem.clone(), problem]),
            "spec.size is 9: use 1 to 7; spec.size is 9: use 1 to 7"
        );
    }

    #[derive(Debug)]
    struct Failed(&'static str, Option<Box<Failed>>);

    impl fmt::Display for Failed {
        fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str(self.0)
        }
    }

    impl Error for Failed {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            let cause = self.1.as_deref()?;
            Some(cause)
        }
    }

    #[test]
    fn error_text_contains_each_cause_once() {
        let cause = Failed("outer: repeated", Some(Box::new(Failed("inner", None))));
        let error = Failed("outer: repeated", Some(Box::new(cause)));
        assert_eq!(Chain(&error).to_string(), "outer: repeated: inner");
    }
}
