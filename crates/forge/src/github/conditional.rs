//! Pull requests as they were last read, with their entity tags: GitHub answers 304 to a request
//! for one that has not changed, and does not count it.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use harvest_proto::api::PullRequest;

use super::settings::RepositoryPath;

// Those of a large team; without an entry a request is merely not conditional.
const MAX_ENTRIES: usize = 2000;

type PullKey = (RepositoryPath, u64);

#[derive(Debug, Default)]
pub(super) struct KnownPulls(Mutex<HashMap<PullKey, (String, PullRequest)>>);

impl KnownPulls {
    pub(super) fn etag(&self, path: &RepositoryPath, number: u64) -> Option<String> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&(path.clone(), number)).map(|(etag, _)| etag.clone())
    }

    pub(super) fn get(&self, path: &RepositoryPath, number: u64) -> Option<PullRequest> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&(path.clone(), number)).map(|(_, pull)| pull.clone())
    }

    pub(super) fn keep(&self, path: &RepositoryPath, etag: Option<String>, pull: &PullRequest) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (path.clone(), pull.number);
        let Some(etag) = etag else {
            known.remove(&key);
            return;
        };
        if known.len() >= MAX_ENTRIES && !known.contains_key(&key) {
            known.clear();
        }
        known.insert(key, (etag, pull.clone()));
    }
}
