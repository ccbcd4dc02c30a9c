//! Objects that several answers contain: users, repositories, commits, changes.

use harvest_proto::{Timestamp, repository_name::LOCAL_OWNER};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

use super::client::RepositoryAccess;
use crate::local::{
    ForgeError, git,
    history::{Commit, FileChange},
};

/// Makes the URLs in answers.
#[derive(Debug, Clone)]
pub(super) struct Urls {
    public: String,
    api: String,
}

impl Urls {
    pub(super) fn new(public: &str, path: &str) -> Self {
        Self { public: public.to_owned(), api: format!("{public}{path}") }
    }

    /// The URL of a route, which starts with a slash.
    pub(super) fn api(&self, path: &str) -> String {
        format!("{}{path}", self.api)
    }

    /// The URL of a page, which starts with a slash.
    pub(super) fn html(&self, path: &str) -> String {
        format!("{}{path}", self.public)
    }

    pub(super) fn repository(&self, name: &str, path: &str) -> String {
        self.api(&format!("/repos/{LOCAL_OWNER}/{name}{path}"))
    }

    pub(super) fn page(&self, name: &str, path: &str) -> String {
        self.html(&format!("/{LOCAL_OWNER}/{name}{path}"))
    }
}

/// Percent-encodes all but letters, digits, `-`, `_`, `.`, `~` and `/`.
pub(super) fn encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

/// A number that is the same in every answer, for things that have only a name.
pub(super) fn id_of(kind: &str, name: &str) -> u64 {
    let hash = digest(&SHA256, format!("{kind}:{name}").as_bytes());
    // 48 bits: JavaScript reads larger numbers inexactly.
    hash.as_ref().iter().take(6).fold(0, |id, byte| id << 8 | u64::from(*byte))
}

pub(super) fn node_id(kind: &str, id: impl std::fmt::Display) -> String {
    use base64::{Engine, prelude::BASE64_STANDARD_NO_PAD};
    BASE64_STANDARD_NO_PAD.encode(format!("{kind}:{id}"))
}

/// A time as GitHub prints it: without fractions of a second.
pub(super) fn time(at: Timestamp) -> String {
    Timestamp::from_millis(at.as_millis().div_euclid(1000) * 1000).to_string().replace(".000Z", "Z")
}

pub(super) fn user(urls: &Urls, login: &str) -> Value {
    let encoded = encode(login);
    let url = urls.api(&format!("/users/{encoded}"));
    let id = id_of("User", login);
    json!({
        "login": login,
        "id": id,
        "node_id": node_id("User", id),
        "avatar_url": urls.html(&format!("/avatars/{encoded}")),
        "gravatar_id": "",
        "url": url,
        "html_url": urls.html(&format!("/{encoded}")),
        "followers_url": format!("{url}/followers"),
        "following_url": format!("{url}/following{{/other_user}}"),
        "gists_url": format!("{url}/gists{{/gist_id}}"),
        "starred_url": format!("{url}/starred{{/owner}}{{/repo}}"),
        "subscriptions_url": format!("{url}/subscriptions"),
        "organizations_url": format!("{url}/orgs"),
        "repos_url": format!("{url}/repos"),
        "events_url": format!("{url}/events{{/privacy}}"),
        "received_events_url": format!("{url}/received_events"),
        "type": if login.ends_with("[bot]") { "Bot" } else { "User" },
        "site_admin": false,
    })
}

/// The numbers and times of a repository that git knows.
struct RepositoryFacts {
    default_branch: String,
    created_at: String,
    pushed_at: String,
    kilobytes: u64,
    open_pulls: usize,
}

async fn facts(repository: &RepositoryAccess) -> Result<RepositoryFacts, ForgeError> {
    let git = &repository.git;
    let head = std::fs::read_to_string(git.join("HEAD")).unwrap_or_default();
    let default_branch = head.trim().strip_prefix("ref: refs/heads/").unwrap_or("main").to_owned();
    let created = std::fs::metadata(git.join("config")).and_then(|data| data.modified());
    let created_at = created.map_or(Timestamp::from_millis(0), Timestamp::from);
    let newest = [
        "for-each-ref",
        "--sort=-committerdate",
        "--count=1",
        "--format=%(committerdate:format-local:%Y-%m-%dT%H:%M:%SZ)",
        "refs/heads/",
    ];
    let pushed = git::run(git, "find the newest commit", &newest).await?;
    let objects = git::run(git, "measure a repository", &["count-objects", "-v"]).await?;
    let kilobytes = objects
        .lines()
        .filter_map(|line| line.strip_prefix("size: ").or(line.strip_prefix("size-pack: ")))
        .filter_map(|size| size.parse::<u64>().ok())
        .sum();
    let created_at = time(created_at);
    let pushed_at = Some(pushed.trim()).filter(|pushed| !pushed.is_empty());
    Ok(RepositoryFacts {
        default_branch,
        pushed_at: pushed_at.unwrap_or(&created_at).to_owned(),
        created_at,
        kilobytes,
        open_pulls: repository.forge.open_pull_requests(&repository.name)?,
    })
}

/// A repository with all that GitHub's three kinds of it (minimal, plain, full) contain.
pub(super) async fn repository(access: &RepositoryAccess) -> Result<Value, ForgeError> {
    let RepositoryFacts { default_branch, created_at, pushed_at, kilobytes, open_pulls } =
        facts(access).await?;
    let (urls, name) = (&access.urls, access.name.as_str());
    let id = id_of("Repository", name);
    let html = urls.page(name, "");
    let mut repository = json!({
        "id": id,
        "node_id": node_id("Repository", id),
        "name": name,
        "full_name": format!("{LOCAL_OWNER}/{name}"),
        "private": true,
        "visibility": "private",
        "owner": user(urls, LOCAL_OWNER),
        "html_url": html,
        "url": urls.repository(name, ""),
        "description": null,
        "homepage": null,
        "language": null,
        "license": null,
        "mirror_url": null,
        "fork": false,
        "archived": false,
        "disabled": false,
        "is_template": false,
        "topics": [],
        "default_branch": default_branch,
        "created_at": created_at,
        "updated_at": pushed_at,
        "pushed_at": pushed_at,
        "size": kilobytes,
        "open_issues": open_pulls,
        "open_issues_count": open_pulls,
        "has_issues": false,
        "has_projects": false,
        "has_wiki": false,
        "has_pages": false,
        "has_downloads": false,
        "has_discussions": false,
        "allow_merge_commit": true,
        "allow_squash_merge": true,
        "allow_rebase_merge": false,
        "allow_auto_merge": false,
        "delete_branch_on_merge": false,
        "clone_url": format!("{html}.git"),
        "svn_url": html,
        // The forge has no git:// and no SSH. Clients parse the first as a URL, but not the second.
        "git_url": format!("{html}.git"),
        "ssh_url": "",
    });
    for counter in [
        "forks",
        "forks_count",
        "stargazers_count",
        "watchers",
        "watchers_count",
        "network_count",
        "subscribers_count",
    ] {
        repository[counter] = 0.into();
    }
    for (field, path) in REPOSITORY_URLS {
        repository[*field] = urls.repository(name, path).into();
    }
    Ok(repository)
}

const REPOSITORY_URLS: &[(&str, &str)] = &[
    ("archive_url", "/{archive_format}{/ref}"),
    ("assignees_url", "/assignees{/user}"),
    ("blobs_url", "/git/blobs{/sha}"),
    ("branches_url", "/branches{/branch}"),
    ("collaborators_url", "/collaborators{/collaborator}"),
    ("comments_url", "/comments{/number}"),
    ("commits_url", "/commits{/sha}"),
    ("compare_url", "/compare/{base}...{head}"),
    ("contents_url", "/contents/{+path}"),
    ("contributors_url", "/contributors"),
    ("deployments_url", "/deployments"),
    ("downloads_url", "/downloads"),
    ("events_url", "/events"),
    ("forks_url", "/forks"),
    ("git_commits_url", "/git/commits{/sha}"),
    ("git_refs_url", "/git/refs{/sha}"),
    ("git_tags_url", "/git/tags{/sha}"),
    ("hooks_url", "/hooks"),
    ("issue_comment_url", "/issues/comments{/number}"),
    ("issue_events_url", "/issues/events{/number}"),
    ("issues_url", "/issues{/number}"),
    ("keys_url", "/keys{/key_id}"),
    ("labels_url", "/labels{/name}"),
    ("languages_url", "/languages"),
    ("merges_url", "/merges"),
    ("milestones_url", "/milestones{/number}"),
    ("notifications_url", "/notifications{?since,all,participating}"),
    ("pulls_url", "/pulls{/number}"),
    ("releases_url", "/releases{/id}"),
    ("stargazers_url", "/stargazers"),
    ("statuses_url", "/statuses/{sha}"),
    ("subscribers_url", "/subscribers"),
    ("subscription_url", "/subscription"),
    ("tags_url", "/tags"),
    ("teams_url", "/teams"),
    ("trees_url", "/git/trees{/sha}"),
];

pub(super) fn commit(access: &RepositoryAccess, commit: &Commit) -> Value {
    let (urls, name, sha) = (&access.urls, access.name.as_str(), &commit.sha);
    let url = urls.repository(name, &format!("/commits/{sha}"));
    let signature = |signature: &crate::local::history::Signature| json!({"name": signature.name, "email": signature.email, "date": signature.date});
    let parent = |sha: &String| {
        json!({
            "sha": sha,
            "url": urls.repository(name, &format!("/commits/{sha}")),
            "html_url": urls.page(name, &format!("/commit/{sha}")),
        })
    };
    json!({
        "sha": sha,
        "node_id": node_id("Commit", sha),
        "url": url,
        "html_url": urls.page(name, &format!("/commit/{sha}")),
        "comments_url": format!("{url}/comments"),
        "commit": {
            "author": signature(&commit.author),
            "committer": signature(&commit.committer),
            "message": commit.message,
            "tree": {
                "sha": commit.tree,
                "url": urls.repository(name, &format!("/git/trees/{}", commit.tree)),
            },
            "url": urls.repository(name, &format!("/git/commits/{sha}")),
            "comment_count": 0,
        },
        // The forge has no accounts that an address could belong to.
        "author": null,
        "committer": null,
        "parents": commit.parents.iter().map(parent).collect::<Vec<_>>(),
    })
}

pub(super) fn change(access: &RepositoryAccess, commit: &str, change: &FileChange) -> Value {
    let (urls, name) = (&access.urls, access.name.as_str());
    let path = encode(&change.path);
    let mut entry = json!({
        "sha": change.blob,
        "filename": change.path,
        "status": change.status,
        "additions": change.additions,
        "deletions": change.deletions,
        "changes": change.additions + change.deletions,
        "blob_url": urls.page(name, &format!("/blob/{commit}/{path}")),
        "raw_url": urls.page(name, &format!("/raw/{commit}/{path}")),
        "contents_url": urls.repository(name, &format!("/contents/{path}?ref={commit}")),
    });
    if let Some(patch) = &change.patch {
        entry["patch"] = patch.as_str().into();
    }
    if let Some(previous) = &change.previous {
        entry["previous_filename"] = previous.as_str().into();
    }
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_characters_are_encoded() {
        assert_eq!(encode("a/ü #[bot]"), "a/%C3%BC%20%23%5Bbot%5D");
    }

    #[test]
    fn times_have_no_fractions() {
        assert_eq!(time(Timestamp::from_millis(1_763_196_705_123)), "2025-11-15T08:51:45Z");
    }
}
