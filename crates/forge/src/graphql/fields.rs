//! The fields of a pull request that documents of `gh` select, each in exactly the form in which
//! `gh` writes it, and their values out of GitHub's REST objects.

use std::sync::LazyLock;

use harvest_proto::RepositoryName;
use serde_json::{Map, Value, json};

use super::{
    NodeId,
    syntax::{Document, SelectedField, Selection},
};

/// A request besides that for the pull request in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    /// Lists have it.
    Listed,
    Pull,
    Comments,
    Reviews,
    Files,
    Commits,
    Checks,
}

/// What is known of a pull request, as REST objects.
#[derive(Debug, Default)]
pub(super) struct PullFacts {
    pub(super) pull: Value,
    pub(super) comments: Vec<Value>,
    pub(super) reviews: Vec<Value>,
    pub(super) files: Vec<Value>,
    pub(super) commits: Vec<Value>,
    pub(super) statuses: Vec<Value>,
    pub(super) check_runs: Vec<Value>,
}

type Read = fn(&RepositoryName, &PullFacts) -> Value;

struct KnownField {
    source: Source,
    field: SelectedField,
    read: Read,
}

/// A field that was asked for.
pub(super) struct ChosenField {
    key: &'static str,
    pub(super) source: Source,
    read: Read,
}

/// The chosen fields; the error is the name of the first that is not served. Each is chosen once:
/// a short document could otherwise ask for a long text thousands of times.
pub(super) fn choose(selected: &[Selection]) -> Result<Vec<ChosenField>, String> {
    let choose = |selection: &Selection| {
        let Selection::Field(field) = selection else { return Err("a fragment".to_owned()) };
        let known = KNOWN.iter().find(|known| known.field == *field);
        let chosen = |known: &'static KnownField| ChosenField {
            key: known.field.key(),
            source: known.source,
            read: known.read,
        };
        known.map(chosen).ok_or_else(|| field.key().to_owned())
    };
    let mut all: Vec<ChosenField> = Vec::new();
    for selection in selected {
        let chosen = choose(selection)?;
        if all.iter().any(|other| other.key == chosen.key) {
            return Err(format!("a second {}", chosen.key));
        }
        all.push(chosen);
    }
    Ok(all)
}

/// The pull request with the chosen fields.
pub(super) fn object(
    repository: &RepositoryName,
    facts: &PullFacts,
    chosen: &[ChosenField],
) -> Value {
    let pair = |field: &ChosenField| (field.key.to_owned(), (field.read)(repository, facts));
    Value::Object(chosen.iter().map(pair).collect::<Map<_, _>>())
}

static KNOWN: LazyLock<Vec<KnownField>> = LazyLock::new(|| {
    let known = |(text, source, read): &(&str, Source, Read)| {
        let document = Document::parse(&format!("{{{text}}}")).expect("a test parses all fields");
        let selection = document
            .operations
            .into_iter()
            .next()
            .and_then(|operation| operation.selections.into_iter().next());
        let Some(Selection::Field(field)) = selection else { unreachable!("each is one field") };
        KnownField { source: *source, field, read: *read }
    };
    FIELDS.iter().map(known).collect()
});

const FIELDS: &[(&str, Source, Read)] = &[
    ("id", Source::Listed, |repository, facts| {
        NodeId::Pull(repository.clone(), number(facts)).to_string().into()
    }),
    ("number", Source::Listed, |_, facts| facts.pull["number"].clone()),
    ("fullDatabaseId", Source::Listed, |_, facts| facts.pull["id"].to_string().into()),
    ("title", Source::Listed, |_, facts| facts.pull["title"].clone()),
    ("body", Source::Listed, |_, facts| or_empty(&facts.pull["body"])),
    ("url", Source::Listed, |_, facts| facts.pull["html_url"].clone()),
    ("state", Source::Listed, |_, facts| state(&facts.pull).into()),
    ("isDraft", Source::Listed, |_, facts| facts.pull["draft"].clone()),
    ("closed", Source::Listed, |_, facts| (state(&facts.pull) != "OPEN").into()),
    ("createdAt", Source::Listed, |_, facts| facts.pull["created_at"].clone()),
    ("updatedAt", Source::Listed, |_, facts| facts.pull["updated_at"].clone()),
    ("closedAt", Source::Listed, |_, facts| facts.pull["closed_at"].clone()),
    ("mergedAt", Source::Listed, |_, facts| facts.pull["merged_at"].clone()),
    ("baseRefName", Source::Listed, |_, facts| facts.pull["base"]["ref"].clone()),
    ("baseRefOid", Source::Listed, |_, facts| facts.pull["base"]["sha"].clone()),
    ("headRefName", Source::Listed, |_, facts| facts.pull["head"]["ref"].clone()),
    ("headRefOid", Source::Listed, |_, facts| facts.pull["head"]["sha"].clone()),
    ("isCrossRepository", Source::Listed, |_, facts| is_of_fork(&facts.pull).into()),
    ("headRepositoryOwner{id,login,...on User{name}}", Source::Listed, |_, facts| {
        user(&facts.pull["head"]["user"])
    }),
    ("headRepository{id,name,nameWithOwner}", Source::Listed, |_, facts| {
        let repository = &facts.pull["head"]["repo"];
        if repository.is_null() {
            return Value::Null;
        }
        json!({
            "id": repository["node_id"],
            "name": repository["name"],
            "nameWithOwner": repository["full_name"],
        })
    }),
    ("author{login,...on User{id,name}}", Source::Listed, |_, facts| user(&facts.pull["user"])),
    (
        "assignees(first:100){nodes{id,login,name,databaseId},totalCount}",
        Source::Listed,
        |_, facts| {
            let assignees = items(&facts.pull["assignees"]);
            let nodes: Vec<Value> = assignees
                .iter()
                .map(|one| {
                    let mut user = user(one);
                    user["databaseId"] = one["id"].clone();
                    user
                })
                .collect();
            counted(nodes)
        },
    ),
    (
        "labels(first:100){nodes{id,name,description,color},totalCount}",
        Source::Listed,
        |_, facts| {
            let label = |one: &Value| {
                json!({
                    "id": one["node_id"],
                    "name": one["name"],
                    "description": one["description"],
                    "color": one["color"],
                })
            };
            counted(items(&facts.pull["labels"]).iter().map(label).collect())
        },
    ),
    ("milestone{number,title,description,dueOn}", Source::Listed, |_, facts| {
        let milestone = &facts.pull["milestone"];
        if milestone.is_null() {
            return Value::Null;
        }
        json!({
            "number": milestone["number"],
            "title": milestone["title"],
            "description": milestone["description"],
            "dueOn": milestone["due_on"],
        })
    }),
    (
        "reviewRequests(first: 100) {nodes {requestedReviewer {__typename,...on User{login,name},\
         ...on Bot{login},...on Team{organization{login}name,slug}}}}",
        Source::Listed,
        |_, facts| {
            let person = |one: &Value| {
                let kind = if one["type"] == "Bot" { "Bot" } else { "User" };
                json!({"__typename": kind, "login": one["login"], "name": ""})
            };
            let team = |one: &Value| {
                json!({
                    "__typename": "Team",
                    "organization": {"login": ""},
                    "name": one["name"],
                    "slug": one["slug"],
                })
            };
            let people = items(&facts.pull["requested_reviewers"]).iter().map(person);
            let teams = items(&facts.pull["requested_teams"]).iter().map(team);
            let nodes = people.chain(teams).map(|one| json!({"requestedReviewer": one}));
            json!({"nodes": nodes.collect::<Vec<_>>()})
        },
    ),
    (
        "autoMergeRequest {authorEmail,commitBody,commitHeadline,mergeMethod,enabledAt,\
         enabledBy{login,...on User{id,name}}}",
        Source::Listed,
        |_, facts| {
            let automatic = &facts.pull["auto_merge"];
            if automatic.is_null() {
                return Value::Null;
            }
            json!({
                "authorEmail": null,
                "commitBody": automatic["commit_message"],
                "commitHeadline": automatic["commit_title"],
                "mergeMethod": upper(&automatic["merge_method"]),
                "enabledAt": null,
                "enabledBy": user(&automatic["enabled_by"]),
            })
        },
    ),
    ("mergeCommit{oid}", Source::Listed, |_, facts| {
        let merged = state(&facts.pull) == "MERGED";
        merge_commit(&facts.pull, merged)
    }),
    ("potentialMergeCommit{oid}", Source::Listed, |_, facts| {
        let is_open = state(&facts.pull) == "OPEN";
        merge_commit(&facts.pull, is_open)
    }),
    // GitHub's REST objects of pull requests have none.
    ("reactionGroups{content,users{totalCount}}", Source::Listed, |_, _| json!([])),
    ("maintainerCanModify", Source::Pull, |_, facts| facts.pull["maintainer_can_modify"].clone()),
    ("additions", Source::Pull, |_, facts| facts.pull["additions"].clone()),
    ("deletions", Source::Pull, |_, facts| facts.pull["deletions"].clone()),
    ("changedFiles", Source::Pull, |_, facts| facts.pull["changed_files"].clone()),
    ("commits{totalCount}", Source::Pull, |_, facts| json!({"totalCount": facts.pull["commits"]})),
    ("mergeable", Source::Pull, |_, facts| {
        let known = facts.pull["mergeable"].as_bool();
        known.map_or("UNKNOWN", |fits| if fits { "MERGEABLE" } else { "CONFLICTING" }).into()
    }),
    ("mergeStateStatus", Source::Pull, |_, facts| upper(&facts.pull["mergeable_state"])),
    ("mergedBy{login,...on User{id,name}}", Source::Pull, |_, facts| {
        user(&facts.pull["merged_by"])
    }),
    (
        "comments(first: 100) {nodes {id,author{login,...on User{id,name}},authorAssociation,body,\
         createdAt,includesCreatedEdit,isMinimized,minimizedReason,reactionGroups{content,\
         users{totalCount}},url,viewerDidAuthor},pageInfo{hasNextPage,endCursor},totalCount}",
        Source::Comments,
        |_, facts| paged(facts.comments.iter().map(comment).collect()),
    ),
    (
        "reviews(first: 100) {nodes {id,author{login},authorAssociation,submittedAt,body,state,\
         commit{oid},reactionGroups{content,users{totalCount}}}pageInfo{hasNextPage,endCursor}\
         totalCount}",
        Source::Reviews,
        |_, facts| paged(facts.reviews.iter().map(review).collect()),
    ),
    (
        "files(first: 100) {nodes {additions,deletions,path,changeType}}",
        Source::Files,
        |_, facts| {
            let file = |one: &Value| {
                json!({
                    "additions": one["additions"],
                    "deletions": one["deletions"],
                    "path": one["filename"],
                    "changeType": upper(&one["status"]),
                })
            };
            json!({"nodes": facts.files.iter().map(file).collect::<Vec<_>>()})
        },
    ),
    (
        "commits(first: 100) {nodes {commit {authors(first:100) {nodes {name,email,\
         user{id,login}}},messageHeadline,messageBody,oid,committedDate,authoredDate}}}",
        Source::Commits,
        |_, facts| json!({"nodes": facts.commits.iter().map(commit).collect::<Vec<_>>()}),
    ),
    (
        "statusCheckRollup: commits(last: 1) {nodes {commit {statusCheckRollup {\
         contexts(first:100) {nodes {__typename...on StatusContext {context,state,targetUrl,\
         createdAt,description},...on CheckRun {name,checkSuite{workflowRun{workflow{name}}},\
         status,conclusion,startedAt,completedAt,detailsUrl}},pageInfo{hasNextPage,endCursor}}}}}}",
        Source::Checks,
        |_, facts| checks(facts),
    ),
];

fn number(facts: &PullFacts) -> u64 {
    facts.pull["number"].as_u64().unwrap_or_default()
}

/// A state in GraphQL's words.
pub(super) fn state(pull: &Value) -> &'static str {
    match (pull["state"].as_str(), pull["merged_at"].is_null()) {
        (Some("open"), _) => "OPEN",
        (_, false) => "MERGED",
        (_, true) => "CLOSED",
    }
}

/// Whether the head branch is in another repository than the base branch.
pub(super) fn is_of_fork(pull: &Value) -> bool {
    pull["head"]["repo"]["full_name"] != pull["base"]["repo"]["full_name"]
}

fn merge_commit(pull: &Value, shown: bool) -> Value {
    let sha = &pull["merge_commit_sha"];
    if shown && !sha.is_null() { json!({ "oid": sha }) } else { Value::Null }
}

fn user(user: &Value) -> Value {
    if user.is_null() {
        return Value::Null;
    }
    json!({"id": user["node_id"], "login": user["login"], "name": ""})
}

fn comment(one: &Value) -> Value {
    json!({
        "id": one["node_id"],
        "author": user(&one["user"]),
        "authorAssociation": one["author_association"],
        "body": or_empty(&one["body"]),
        "createdAt": one["created_at"],
        "includesCreatedEdit": one["created_at"] != one["updated_at"],
        "isMinimized": false,
        "minimizedReason": null,
        "reactionGroups": reactions(&one["reactions"]),
        "url": one["html_url"],
        // Comments are not changed here, and `gh` asks for it only to change its own.
        "viewerDidAuthor": false,
    })
}

fn review(one: &Value) -> Value {
    json!({
        "id": one["node_id"],
        "author": user(&one["user"]),
        "authorAssociation": one["author_association"],
        "submittedAt": one["submitted_at"],
        "body": or_empty(&one["body"]),
        "state": one["state"],
        "commit": {"oid": one["commit_id"]},
        "reactionGroups": [],
    })
}

/// Reactions as groups; those without any are left out.
fn reactions(counts: &Value) -> Value {
    const NAMES: [(&str, &str); 8] = [
        ("+1", "THUMBS_UP"),
        ("-1", "THUMBS_DOWN"),
        ("laugh", "LAUGH"),
        ("hooray", "HOORAY"),
        ("confused", "CONFUSED"),
        ("heart", "HEART"),
        ("rocket", "ROCKET"),
        ("eyes", "EYES"),
    ];
    let group = |(name, content): (&str, &str)| {
        let count = counts[name].as_u64().filter(|count| *count > 0)?;
        Some(json!({"content": content, "users": {"totalCount": count}}))
    };
    NAMES.into_iter().filter_map(group).collect()
}

fn commit(one: &Value) -> Value {
    let (commit, author) = (&one["commit"], &one["commit"]["author"]);
    let message = commit["message"].as_str().unwrap_or_default();
    let (headline, body) = message.split_once('\n').unwrap_or((message, ""));
    json!({"commit": {
        "authors": {"nodes": [{
            "name": author["name"],
            "email": author["email"],
            "user": user(&one["author"]),
        }]},
        "messageHeadline": headline,
        "messageBody": body.trim_start_matches('\n'),
        "oid": one["sha"],
        "committedDate": commit["committer"]["date"],
        "authoredDate": author["date"],
    }})
}

fn checks(facts: &PullFacts) -> Value {
    let status = |one: &Value| {
        json!({
            "__typename": "StatusContext",
            "context": one["context"],
            "state": upper(&one["state"]),
            "targetUrl": or_empty(&one["target_url"]),
            "createdAt": one["created_at"],
            "description": or_empty(&one["description"]),
        })
    };
    let run = |one: &Value| {
        json!({
            "__typename": "CheckRun",
            "name": one["name"],
            "checkSuite": {"workflowRun": null},
            "status": upper(&one["status"]),
            "conclusion": upper(&one["conclusion"]),
            "startedAt": one["started_at"],
            "completedAt": one["completed_at"],
            "detailsUrl": or_empty(&one["details_url"]),
        })
    };
    let contexts: Vec<Value> =
        facts.statuses.iter().map(status).chain(facts.check_runs.iter().map(run)).collect();
    let rollup = match contexts.is_empty() {
        true => Value::Null,
        false => json!({"contexts": paged(contexts)}),
    };
    json!({"nodes": [{"commit": {"statusCheckRollup": rollup}}]})
}

fn items(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

fn or_empty(text: &Value) -> Value {
    text.as_str().unwrap_or_default().into()
}

fn upper(text: &Value) -> Value {
    text.as_str().unwrap_or_default().to_uppercase().into()
}

fn counted(nodes: Vec<Value>) -> Value {
    json!({"totalCount": nodes.len(), "nodes": nodes})
}

/// A list that is one page.
fn paged(nodes: Vec<Value>) -> Value {
    let mut list = counted(nodes);
    list["pageInfo"] = json!({"hasNextPage": false, "endCursor": ""});
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_fields_parse_and_are_different() {
        for (index, one) in KNOWN.iter().enumerate() {
            assert!(KNOWN[..index].iter().all(|other| other.field != one.field));
        }
        assert_eq!(KNOWN.len(), FIELDS.len());
    }

    #[test]
    fn fields_of_other_forms_are_refused() {
        let choose = |text: &str| {
            let document = Document::parse(text).unwrap();
            choose(&document.operations[0].selections).map(|chosen| chosen.len())
        };
        assert_eq!(choose("{number title author{login ... on User{id name}}}"), Ok(3));
        assert_eq!(choose("{number headRepository{owner{email}}}"), Err("headRepository".into()));
        assert_eq!(choose("{title: body}"), Err("title".into()));
        assert_eq!(choose("{comments(first: 5){nodes{id}}}"), Err("comments".into()));
        assert_eq!(choose("{... on PullRequest{number}}"), Err("a fragment".into()));
    }

    #[test]
    fn repeated_fields_are_refused() {
        for (text, key) in [
            ("body ".repeat(6_500), "body"),
            ("commits{totalCount} number commits{totalCount}".to_owned(), "commits"),
        ] {
            let document = Document::parse(&format!("{{{text}}}")).unwrap();
            let refused = choose(&document.operations[0].selections).err();
            assert_eq!(refused, Some(format!("a second {key}")));
        }
    }

    #[test]
    fn closed_and_merged_are_different_states() {
        for (pull, expected) in [
            (json!({"state": "open", "merged_at": null}), "OPEN"),
            (json!({"state": "closed", "merged_at": null}), "CLOSED"),
            (json!({"state": "closed", "merged_at": "2026-01-01T00:00:00Z"}), "MERGED"),
        ] {
            assert_eq!(state(&pull), expected);
        }
    }
}
