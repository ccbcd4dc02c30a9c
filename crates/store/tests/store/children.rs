//! Sessions that agents created.

use harvest_store::{ChildCounts, Lineage, Write};

use crate::test_store::{NOW, TestStore, on_both};

on_both! {
    children_are_counted_below_their_root,
}

async fn children_are_counted_below_their_root(test: TestStore) {
    let [root, child, grandchild] =
        [test.session().await, test.session().await, test.session().await];
    let below_root = Lineage { parent: root.clone(), root: root.clone() };
    let below_child = Lineage { parent: child.clone(), root: root.clone() };
    test.commit(&child, vec![Write::ChildOf(below_root.clone())]).await.unwrap();
    test.commit(&grandchild, vec![Write::ChildOf(below_child.clone())]).await.unwrap();
    assert_eq!(test.store.child_lineage(&root).await.unwrap(), None);
    assert_eq!(test.store.child_lineage(&child).await.unwrap(), Some(below_root));
    assert_eq!(test.store.child_lineage(&grandchild).await.unwrap(), Some(below_child));
    let counts = async || test.store.child_counts(&root).await.unwrap();
    assert_eq!(counts().await, ChildCounts { all: 2, active: 2 });
    test.store.session_delete(&grandchild, test.lease, Vec::new(), NOW).await.unwrap();
    assert_eq!(counts().await, ChildCounts { all: 1, active: 1 });
    let none = ChildCounts { all: 0, active: 0 };
    assert_eq!(test.store.child_counts(&child).await.unwrap(), none);
}
