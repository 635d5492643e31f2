//! A check of cron expressions that their parser does not make.

/// True if a list in a cron expression has an empty entry, such as `,` or `1,,2`. The parser accepts such a list, but
/// the search for the next time then takes seconds. A single object with such a schedule would delay all other objects.
pub fn has_empty_entry(schedule: &str) -> bool {
    let mut entries = schedule
        .split_whitespace()
        .flat_map(|field| field.split(','));
    entries.any(str::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_list_entries_of_schedule_are_found() {
        for schedule in [", 3 * * *", "0,,30 3 * * *", "0 3 * * 1,", "0 ,3 * * *"] {
            assert!(has_empty_entry(schedule), "{schedule}");
        }
        for schedule in ["0 3 * * *", "0,30 3 * JAN,FEB 1-5", "@daily", ""] {
            assert!(!has_empty_entry(schedule), "{schedule}");
        }
    }
}
