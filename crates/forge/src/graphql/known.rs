//! Recognises the documents that `gh` sends for `pr create`, `list`, `view` and `comment`, and the
//! one by which `auth status` finds that it is signed in: the
//! parsed document must equal one of those in `documents/`, except where that says `SELECTED`.
//! Names of operations alone mean nothing, and what is not recognised is not answered.

use std::sync::LazyLock;

use super::syntax::{Document, Selection};

/// Stands for the fields of a pull request that the user chose.
const SELECTED: &str = "SELECTED";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KnownDocument {
    PullRequests,
    PullRequestOfBranch,
    PullRequestByNumber,
    ProjectItems,
    Repository,
    IssueFields,
    CreatePullRequest,
    Comment,
    Viewer,
}

const TEXTS: [(KnownDocument, &str); 9] = [
    (KnownDocument::PullRequests, include_str!("documents/pull_requests.graphql")),
    (KnownDocument::PullRequestOfBranch, include_str!("documents/pull_request_of_branch.graphql")),
    (KnownDocument::PullRequestByNumber, include_str!("documents/pull_request_by_number.graphql")),
    (KnownDocument::ProjectItems, include_str!("documents/project_items.graphql")),
    (KnownDocument::Repository, include_str!("documents/repository.graphql")),
    (KnownDocument::IssueFields, include_str!("documents/issue_fields.graphql")),
    (KnownDocument::CreatePullRequest, include_str!("documents/create_pull_request.graphql")),
    (KnownDocument::Comment, include_str!("documents/comment.graphql")),
    (KnownDocument::Viewer, include_str!("documents/viewer.graphql")),
];

static KNOWN: LazyLock<Vec<(KnownDocument, Document)>> = LazyLock::new(|| {
    let parse = |text| Document::parse(text).expect("a test parses all known documents");
    TEXTS.iter().map(|(name, text)| (*name, parse(text))).collect()
});

/// The known document that this is, and the fields in place of `SELECTED`.
pub(super) fn recognise(given: &Document) -> Option<(KnownDocument, &[Selection])> {
    KNOWN.iter().find_map(|(name, known)| Some((*name, compare(known, given)?)))
}

/// The fields in place of `SELECTED` if the documents are the same otherwise.
fn compare<'a>(known: &Document, given: &'a Document) -> Option<&'a [Selection]> {
    let mut selected: &[Selection] = &[];
    let ([known_operation], [operation]) = (&known.operations[..], &given.operations[..]) else {
        return None;
    };
    let head = |one: &super::syntax::OperationDefinition| {
        (one.kind, one.name.clone(), one.variables.clone())
    };
    let same = head(known_operation) == head(operation)
        && known.fragments.len() == given.fragments.len()
        && matches(&known_operation.selections, &operation.selections, &mut selected)
        && known.fragments.iter().zip(&given.fragments).all(|(known, given)| {
            (&known.name, &known.on) == (&given.name, &given.on)
                && matches(&known.selections, &given.selections, &mut selected)
        });
    same.then_some(selected)
}

fn matches<'a>(
    known: &[Selection],
    given: &'a [Selection],
    selected: &mut &'a [Selection],
) -> bool {
    if let [Selection::Field(field)] = known
        && field.name == SELECTED
    {
        *selected = given;
        return true;
    }
    known.len() == given.len()
        && known.iter().zip(given).all(|(known, given)| match (known, given) {
            (Selection::Field(known), Selection::Field(given)) => {
                (&known.alias, &known.name, &known.arguments)
                    == (&given.alias, &given.name, &given.arguments)
                    && matches(&known.selections, &given.selections, selected)
            }
            _ => known == given,
        })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// What gh 2.103.3 sent: one request per line.
    const RECORDED: &str = include_str!("documents/recorded.jsonl");

    fn recorded() -> Vec<String> {
        let query = |line: &str| {
            let request: Value = serde_json::from_str(line).unwrap();
            request["query"].as_str().unwrap().to_owned()
        };
        RECORDED.lines().map(query).collect()
    }

    #[test]
    fn recorded_documents_of_gh_are_recognised() {
        let names: Vec<KnownDocument> = recorded()
            .iter()
            .map(|text| recognise(&Document::parse(text).unwrap()).unwrap().0)
            .collect();
        for (name, _) in TEXTS {
            assert!(names.contains(&name), "{name:?}");
        }
    }

    #[test]
    fn changed_documents_are_not_recognised() {
        let by_number = recorded().into_iter().find(|text| text.contains("ByNumber")).unwrap();
        let recognised = |text: &str| recognise(&Document::parse(text).unwrap()).is_some();
        assert!(recognised(&by_number));
        for (from, to) in [
            ("repository(", "mine: repository("),
            ("repository(owner: $owner", "repository(owner: \"other\""),
            ("PullRequestByNumber(", "Other("),
            ("$owner: String!", "$owner: String"),
            ("query ", "mutation "),
            ("repository(owner", "viewer{login} repository(owner"),
            ("pullRequest(", "issue("),
        ] {
            let changed = by_number.replacen(from, to, 1);
            assert!(changed != by_number && !recognised(&changed), "{from} {to}");
        }
        let batch = format!("{by_number} query Other{{viewer{{login}}}}");
        let fragment = format!("{by_number} fragment x on User{{login}}");
        let mutation =
            "mutation PullRequestByNumber{deleteRef(input:{refId:\"x\"}){clientMutationId}}";
        for text in [batch.as_str(), &fragment, mutation, "{viewer{login}}"] {
            assert!(!recognised(text), "{text}");
        }
    }

    #[test]
    fn only_selected_fields_may_differ() {
        for (name, text) in TEXTS {
            let holes = text.matches(SELECTED).count();
            let expected = usize::from(matches!(
                name,
                KnownDocument::PullRequests
                    | KnownDocument::PullRequestOfBranch
                    | KnownDocument::PullRequestByNumber
            ));
            assert_eq!(holes, expected, "{name:?}");
        }
    }
}
