//! What is wrong with an object, for people: the field, the problem, the remedy.

use std::fmt;

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
