//! The sync of the checkouts that runs beside the agent: whether it is over, and which files the
//! agent knows from before. [`crate::boot`] runs it, [`crate::agents`] holds tools back meanwhile.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use tokio::sync::watch;

// More than a turn reads during a fetch; a hostile agent must not grow the supervisor.
const MAX_KNOWN_FILES: usize = 1000;
const MAX_PATH_BYTES: usize = 4096;

// A person and a model read the list.
const MAX_NAMED_FILES: usize = 20;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum SyncState {
    /// There is none, or it is over.
    #[default]
    Ended,
    Running,
    /// For this reason; the checkouts cannot be worked on.
    Failed(String),
}

/// The progress of the sync.
#[derive(Debug, Default)]
pub(crate) struct SyncProgress {
    state: watch::Sender<SyncState>,
    /// Files that the agent has read or wants to change, as they were.
    known: RefCell<BTreeMap<PathBuf, Option<FileState>>>,
    searched: Cell<bool>,
    note: RefCell<Option<String>>,
}

/// Changes whenever git replaces a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileState {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

impl FileState {
    fn of(path: &Path) -> Option<Self> {
        let about = fs::metadata(path).ok()?;
        let modified = (about.mtime(), about.mtime_nsec());
        Some(Self { inode: about.ino(), bytes: about.size(), modified })
    }
}

impl SyncProgress {
    pub(crate) fn begin(&self) {
        self.known.borrow_mut().clear();
        self.searched.set(false);
        self.state.send_replace(SyncState::Running);
    }

    /// Ends the sync; `moved` describes the checkouts that are at another commit now.
    pub(crate) fn end(&self, moved: &[String]) {
        let known = std::mem::take(&mut *self.known.borrow_mut());
        let changed = known.into_iter().filter(|(path, before)| FileState::of(path) != *before);
        let changed: Vec<PathBuf> = changed.map(|(path, _)| path).collect();
        self.note.replace(note(moved, &changed, self.searched.get()));
        self.state.send_replace(SyncState::Ended);
    }

    pub(crate) fn fail(&self, reason: String) {
        self.state.send_replace(SyncState::Failed(reason));
    }

    pub(crate) fn is_running(&self) -> bool {
        *self.state.borrow() == SyncState::Running
    }

    /// Why the checkouts cannot be worked on.
    pub(crate) fn failure(&self) -> Option<String> {
        match &*self.state.borrow() {
            SyncState::Failed(reason) => Some(reason.clone()),
            SyncState::Ended | SyncState::Running => None,
        }
    }

    /// Waits until no sync runs. Cancel-safe.
    pub(crate) async fn over(&self) {
        let mut state = self.state.subscribe();
        // The sender lives as long as `self`.
        let _never_closed = state.wait_for(|state| *state != SyncState::Running).await;
    }

    /// Remembers a file that the agent reads or wants to change.
    pub(crate) fn remember_file(&self, path: &Path) {
        let mut known = self.known.borrow_mut();
        if !self.is_running() || known.contains_key(path) {
            return;
        }
        if known.len() >= MAX_KNOWN_FILES || path.as_os_str().len() > MAX_PATH_BYTES {
            return self.searched.set(true);
        }
        known.insert(path.to_owned(), FileState::of(path));
    }

    /// Remembers that the agent has searched: what it found is unknown.
    pub(crate) fn remember_search(&self) {
        self.searched.set(true);
    }

    /// What the agent has to be told, once.
    pub(crate) fn take_note(&self) -> Option<String> {
        self.note.take()
    }
}

fn note(moved: &[String], changed: &[PathBuf], searched: bool) -> Option<String> {
    if changed.is_empty() && (moved.is_empty() || !searched) {
        return None;
    }
    let mut note = "Harvest brought the checkout up to date while you were reading".to_owned();
    if !moved.is_empty() {
        note += &format!(" ({})", moved.join(", "));
    }
    if !changed.is_empty() {
        let names = changed.iter().take(MAX_NAMED_FILES).map(|path| path.display().to_string());
        note += &format!(". These files have changed: {}", names.collect::<Vec<_>>().join(", "));
        if changed.len() > MAX_NAMED_FILES {
            note += &format!(" and {} more", changed.len() - MAX_NAMED_FILES);
        }
    }
    if searched {
        note += ". Results of your searches may be out of date";
    }
    Some(note + ". A refused call has not run: look again at what you rely on, then repeat it.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["same", "changed", "unread"] {
            fs::write(at(name), "old").unwrap();
        }
        let sync = SyncProgress::default();
        sync.remember_file(&at("unread"));
        sync.begin();
        for name in ["same", "changed", "new"] {
            sync.remember_file(&at(name));
        }
        for name in ["changed", "unread", "new"] {
            fs::write(at("part"), "newer").unwrap();
            fs::rename(at("part"), at(name)).unwrap();
        }
        sync.end(&["acme/shop: 1111111 → 2222222".to_owned()]);
        let note = sync.take_note().unwrap();
        assert!(note.contains("changed, ") && note.contains("/new."), "{note}");
        assert!(!note.contains("same") && !note.contains("unread"), "{note}");
        assert!(note.contains("1111111 → 2222222"), "{note}");
        assert_eq!(sync.take_note(), None);
    }

    #[test]
    fn nothing_is_said_without_a_change() {
        let sync = SyncProgress::default();
        sync.begin();
        sync.remember_search();
        sync.end(&[]);
        assert_eq!(sync.take_note(), None);
        sync.begin();
        sync.remember_search();
        sync.end(&["acme/shop".to_owned()]);
        assert!(sync.take_note().unwrap().contains("searches"));
    }

    #[test]
    fn known_files_are_bounded() {
        let sync = SyncProgress::default();
        sync.begin();
        for number in 0..=MAX_KNOWN_FILES {
            sync.remember_file(Path::new(&format!("/nowhere/{number}")));
        }
        assert_eq!(sync.known.borrow().len(), MAX_KNOWN_FILES);
        assert!(sync.searched.get(), "what is not known may have changed");
    }
}
