//! Replaces outputs of commands in the documentation by the outputs that a test has received.

use anyhow::{Context, Result};

/// Replaces the code block after the line "The output of `command` in a test:" in a documentation page.
///
/// # Errors
/// Fails if the page has no such line, or no code block after the line.
pub fn replaced(page: &str, command: &str, output: &str) -> Result<String> {
    let line = format!("The output of `{command}` in a test:\n\n```text\n");
    let (before, rest) = page.split_once(&line).with_context(|| {
        format!("no code block after the line \"The output of `{command}` in a test:\"")
    })?;
    let (_, after) = rest.split_once("```").context("the block has no end")?;
    let lines = output.trim_end().lines().map(str::trim_end);
    let shown: Vec<&str> = lines.collect();
    Ok(format!("{before}{line}{}\n```{after}", shown.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::replaced;

    const PAGE: &str = "# A\n\nThe output of `kubectl get a` in a test:\n\n```text\nold\n```\n\n```text\nother\n```\n";

    #[test]
    fn output_of_command_is_replaced_in_page() {
        let found = replaced(PAGE, "kubectl get a", "NAME   AGE  \nb      1s\n\n").unwrap();
        let expected = PAGE.replace("old", "NAME   AGE\nb      1s");
        assert_eq!(found, expected);
    }

    #[test]
    fn page_without_output_of_command_is_rejected() {
        let error = replaced(PAGE, "kubectl get b", "x").unwrap_err();
        assert!(error.to_string().contains("kubectl get b"), "{error}");
    }
}
