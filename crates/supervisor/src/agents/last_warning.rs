//! The warning about the last start of an agent. Restarts do not repeat it.

use std::cell::RefCell;

#[derive(Default)]
pub(crate) struct LastWarning(RefCell<Option<String>>);

impl LastWarning {
    /// The warning about this start, unless the last one had the same.
    pub(super) fn if_new(&self, warning: Option<String>) -> Option<String> {
        let last = self.0.replace(warning.clone());
        warning.filter(|warning| last.as_ref() != Some(warning))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_start_repeats_no_warning() {
        let last = LastWarning::default();
        let warnings = [Some("busy"), Some("busy"), None, Some("busy")];
        let shown = warnings.map(|warning| last.if_new(warning.map(str::to_owned)).is_some());
        assert_eq!(shown, [true, false, false, true]);
    }
}
