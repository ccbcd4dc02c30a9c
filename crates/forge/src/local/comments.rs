//! Comments on pull requests, one file each.

use std::{
    fs,
    path::{Path, PathBuf},
};

use harvest_proto::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    ForgeError, LocalForge,
    storage::{file_error, read_json, write_json},
};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Comment {
    pub(super) id: u64,
    /// The pull request.
    pub(super) number: u64,
    pub(super) author: String,
    pub(super) body: String,
    pub(super) created_at: Timestamp,
    pub(super) updated_at: Timestamp,
}

impl LocalForge {
    /// Adds a comment to a pull request, which must exist.
    pub(super) async fn add_comment(
        &self,
        name: &str,
        number: u64,
        author: &str,
        body: String,
    ) -> Result<Comment, ForgeError> {
        let folder = self.existing_folder(name)?;
        let _guard = self.shared.writing.lock().await;
        let now = self.shared.clock.now();
        let (id, author) = (self.next_id()?, author.to_owned());
        let comment = Comment { id, number, author, body, created_at: now, updated_at: now };
        write_json(&path(&folder, id), &comment)?;
        Ok(comment)
    }

    pub(super) async fn edit_comment(
        &self,
        name: &str,
        id: u64,
        body: String,
    ) -> Result<Option<Comment>, ForgeError> {
        let path = path(&self.existing_folder(name)?, id);
        let _guard = self.shared.writing.lock().await;
        let Some(mut comment) = read_json::<Comment>(&path)? else { return Ok(None) };
        (comment.body, comment.updated_at) = (body, self.shared.clock.now());
        write_json(&path, &comment)?;
        Ok(Some(comment))
    }

    /// Returns whether there was such a comment.
    pub(super) async fn remove_comment(&self, name: &str, id: u64) -> Result<bool, ForgeError> {
        let path = path(&self.existing_folder(name)?, id);
        let _guard = self.shared.writing.lock().await;
        if read_json::<Comment>(&path)?.is_none() {
            return Ok(false);
        }
        fs::remove_file(&path).map_err(file_error("remove", &path))?;
        Ok(true)
    }

    pub(super) fn comment(&self, name: &str, id: u64) -> Result<Option<Comment>, ForgeError> {
        read_json(&path(&self.existing_folder(name)?, id))
    }

    /// All comments of a pull request, oldest first.
    pub(super) fn comments(&self, name: &str, number: u64) -> Result<Vec<Comment>, ForgeError> {
        let folder = self.existing_folder(name)?.join("comments");
        let Ok(entries) = fs::read_dir(&folder) else { return Ok(Vec::new()) };
        let mut all = Vec::new();
        for entry in entries.filter_map(Result::ok) {
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                all.extend(read_json::<Comment>(&path)?.filter(|comment| comment.number == number));
            }
        }
        all.sort_unstable_by_key(|comment| comment.id);
        Ok(all)
    }
}

fn path(folder: &Path, id: u64) -> PathBuf {
    folder.join("comments").join(format!("{id}.json"))
}
